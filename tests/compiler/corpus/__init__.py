"""A corpus of statements, and digests of the code that the compiler writes for each: the net under its redesign.

    python -m tests.compiler.corpus write before.json          # digests of the code as it is
    python -m tests.compiler.corpus compare before.json        # what changed since, statement by statement
    python -m tests.compiler.corpus show spmm                  # the code behind the digests of one statement

Statements come from the kernel generator's cases, `shipped.json`, the calls recorded in `statements.json`, and
500 random programs. A change that only moves or renames code keeps every digest.
"""
