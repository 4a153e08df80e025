"""C functions and Triton kernels as programs: compiled, kept on disk, launched; the sorting of entries by rows."""
