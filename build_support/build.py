"""Builds the library and the glue with ninja, each in a folder of its own under build/."""

import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_support import jobs, toolchain
from build_support import plan as plans
from build_support.graph import Edge, ninja_text, prune_kernels
from build_support.plan import ROOT, Plan
from build_support.toolchain import BuildError


def build_into(package: Path) -> list[Path]:
    """Brings the library and the glue up to date and copies both into `package`, or ends the process and says why.
    Returns the copies."""
    try:
        wanted = plans.make_plans()
        print(f"flash_attn_ext: {wanted[0].message}", flush=True)
        library = plans.reused_library() or build_library(wanted[0])
        built = {plans.LIBRARY: library} | {plan.glue_name: build_glue(plan, library) for plan in wanted}
    except BuildError as error:
        sys.exit(f"\nflash_attn_ext cannot be built: {error}\n")
    for name, path in built.items():
        replace_if_different(path, package / name)
    remove_unfit_glues(package, set(built))
    return [package / name for name in built]


def remove_unfit_glues(package: Path, built: set[str]) -> None:
    """Removes glues of earlier builds that the library would refuse, so that no wheel takes them along."""
    interface = plans.interface_digest().encode()
    for path in package.glob("_C*.so"):
        if path.name not in built and interface not in path.read_bytes():
            path.unlink()


def build_library(plan: Plan) -> Path:
    """The library with all kernels."""
    shared_kernels = os.environ.get("FLASH_ATTN_EXT_KERNEL_OBJECTS")
    objects = plans.library_objects(plan, shared_kernels or plans.KERNELS_DIR)
    names = [edge.output for edge in objects]
    library = plan.library_dir / plans.LIBRARY
    link = Edge("link", names, str(library), plans.library_link_flags(plan), [plans.EXPORTS])
    _run_ninja(plan, plan.library_dir, [*objects, link])
    if not shared_kernels and not plan.fast:
        prune_kernels(ROOT / plans.KERNELS_DIR, {Path(name).name for name in names})
    return ROOT / library


def build_glue(plan: Plan, library: Path) -> Path:
    """The extension module for the plan's torch and this Python."""
    objects = plans.glue_objects(plan)
    glue = plan.glue_dir / plan.glue_name
    linked = [*(edge.output for edge in objects), str(library)]
    _run_ninja(plan, plan.glue_dir, [*objects, Edge("link", linked, str(glue), plans.glue_link_flags(plan))])
    return ROOT / glue


def _run_ninja(plan: Plan, folder: Path, edges: Sequence[Edge]) -> None:
    ninja, ninja_file = toolchain.find_ninja(), folder / "build.ninja"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    with open(ROOT / folder / ".lock", "w") as lock:  # two ninjas in one folder would spoil each other's log
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"flash_attn_ext: waiting for another build in {ROOT / folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        (ROOT / ninja_file).write_text(ninja_text(edges, folder, plan.cxx, plan.nvcc))
        job_bytes = jobs.NVCC_JOB_BYTES if any(edge.rule == "nvcc" for edge in edges) else jobs.CXX_JOB_BYTES
        machine = jobs.available_cores(), jobs.available_memory()
        num_jobs = str(jobs.num_jobs(*machine, job_bytes, os.environ.get("MAX_JOBS")))
        environment = {"NINJA_STATUS": toolchain.ninja_status(ninja)} | os.environ
        if subprocess.run([ninja, "-f", str(ninja_file), "-j", num_jobs], cwd=ROOT, env=environment).returncode != 0:
            raise BuildError(f"compilation failed, see above. The commands: ninja -v -f {ninja_file}")


def replace_if_different(source: Path, target: Path) -> None:
    if not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
        partial = target.with_name(f"{target.name}.partial")
        shutil.copy2(source, partial)
        partial.replace(target)
