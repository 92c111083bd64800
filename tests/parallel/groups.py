"""Run functions in groups of ranks: processes that one process forks, so that torch is imported once.

python groups.py module ranks folder        runs module.run(mesh) on so many ranks; what it returns becomes JSON
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent


def start(module: str, ranks: int, folder: Path) -> dict[str, str]:
    """Run a module of this folder on so many ranks, and return what rank 0 says of each case: "" if it is right."""
    paths = os.pathsep.join([*sys.path, str(HERE), str(HERE.parent)])
    command = [sys.executable, str(HERE / "groups.py"), module, str(ranks), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    return json.loads((folder / f"{module}-{ranks}.json").read_text())


def child(rank: int, module: str, ranks: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = f"file://{folder}/{module}-{ranks}.store"
    wait = timedelta(minutes=2)  # for a rank that will never answer; torch would wait for half an hour
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=wait)
    cases = import_module(module).cases(init_device_mesh("cpu", (ranks,), mesh_dim_names=("sequence",)))
    outcomes = {}
    for name, case in cases.items():
        try:
            case()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        everyones = [None] * ranks
        dist.all_gather_object(everyones, outcome)
        outcomes[name] = "\n".join(f"rank {i}: {each}" for i, each in enumerate(everyones) if each)
    if rank == 0:
        (folder / f"{module}-{ranks}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    name, number, where = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    import_module(name)  # once, for all ranks
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(rank, name, number, where)) for rank in range(number)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in children))
