"""Benchmarks: one registry of cases, a gate of correctness, timings as JSON, tables and plots from that JSON alone.

    python -m benchmarks.run --list                                     # all cases; modules of `cases/` are found
    python -m benchmarks.run spmm 'subm_conv/cloud=room/*' --modes fwd,fwdbwd --out x.json
    python -m benchmarks.run fctp --quick --supervise --budget 400 --out x.json --resume
    python -m benchmarks.run gcn_layer --replay --runs 3 --save         # CUDA-graph times too; keep the record
    OMP_NUM_THREADS=1 make bench CASES='cpu_*'                          # layers on a CPU beside what they replace
    python -m benchmarks.profile fctp --quick --modes fwd,bwd           # the kernels of a call, by time
    python -m benchmarks.first_step spunet_fp16 --save                  # with empty caches and in a second process
    python -m benchmarks.data_parallel --save                           # steps on one GPU and on two
    python -m benchmarks.selection --save                               # without a case's own measured schedules
    python -m benchmarks.report [x.json]                                # tables with all baselines
    make bench-table                                                    # tables, sentences and plots of README and docs

A case is a function in `cases/` under `registry.case`, which describes what it returns. Nothing is timed until the
operator's tests pass and the result agrees with a float64 oracle. `setting.tiny` asks for the same problem at a small
size, at which tests run every family. Baselines have the versions of `peers.lock` and are tuned as their authors
document.

`--save`, which `make bench` uses, adds a file to `results/history/`, whose files never change, and updates
`results/current/`, of which tables are made (`archive.py`). `python -m benchmarks.archive FILE` takes in a file from
another machine. Prose of README and docs holds no other measured times than those between marks (`sentences.py`), or
those that name a commit.

To ship measured schedules, start from an empty `INSUM_NN_CACHE_DIR`, measure, and call
`insum_nn.schedules.export('insum_nn/schedules/hopper.json')`.
"""
