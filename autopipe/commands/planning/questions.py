"""A plan for devices that this machine does not have: the answer to a question, which changes nothing.

It is stored in a work directory of its own, ``question/`` in the one of the command, and no run uses it.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

import psutil
import torch

from autopipe.commands.settings import PlanSettings
from autopipe.commands.store import PlanRecord, Store, written
from autopipe.cores import usable_cores
from autopipe.errors import ArtifactError, PlanError, counted
from autopipe.ir.profile import Device
from autopipe.planning.cost.datasheets import datasheet, recognized
from autopipe.planning.requests import PlanRequest
from autopipe.units import in_bytes


def asked(request: PlanRequest, settings: PlanSettings) -> str:
    """Return what makes a request a question, or "" if it is a plan for this machine.

    That is a device that is not here, or a cluster with more devices. Other options that describe links and memory, and
    more ranks than this machine has GPUs or cores, are a question if they would replace a plan for this machine.
    """
    on_gpus = settings.profile.device != "cpu" and torch.cuda.is_available()
    places = torch.cuda.device_count() if on_gpus else usable_cores()
    here = f"this machine has {counted(places, 'GPU' if on_gpus else 'core')}"
    cluster = request.cluster
    named = [request.device_name or ""] if cluster is None else [device.datasheet for device in cluster.devices]
    gpu = _measured_gpu(settings) if on_gpus else None
    others = [name for name in named if name and not (gpu and _has_datasheet(gpu, name))]
    if others:
        return f"a plan for {others[0]}, and {here}"
    if cluster is not None and cluster.num_ranks > places:
        return f"a cluster of {counted(cluster.num_ranks, 'device')}, and {here}"
    record = _replaced(settings)
    if record is None or record.request.cluster is not None or record.request.link is not None:
        return ""
    if cluster is not None or request.link is not None:
        return f"{'--link' if cluster is None else '--cluster'}, and the stored plan is for this machine"
    most = gpu.memory_bytes if gpu else psutil.virtual_memory().total
    if (request.gpu_memory_bytes or 0) > most:
        return f"--gpu-memory {in_bytes(request.gpu_memory_bytes or 0)}, and a device here has {in_bytes(most)}"
    if record.cluster.num_devices <= places < (request.gpus or 0):
        return (
            f"--gpus {request.gpus}, and {here}; the stored plan is for {counted(record.cluster.num_devices, 'rank')}"
        )
    return ""


def _measured_gpu(settings: PlanSettings) -> Device | None:
    """Return the GPU of the stored profile, if it is one of this machine. The command itself does not use a GPU."""
    try:
        device = Store(settings.work_dir).stored_profile().device
    except ArtifactError:
        return None
    return device if device.kind == "cuda" else None


def _has_datasheet(gpu: Device, name: str) -> bool:
    try:
        sheet = recognized(gpu.name)
    except PlanError:  # several datasheets fit
        return True
    return sheet is not None and sheet.name == datasheet(name).name


def _replaced(settings: PlanSettings) -> PlanRecord | None:
    """Return the record of the stored plan of the model of the settings, or None."""
    try:
        plan, record = Store(settings.work_dir).stored_plan()
    except ArtifactError:
        return None
    target = settings.profile.model.target
    return record if not target or target.split(":")[0] == plan.workload.target.split(":")[0] else None


def apart(settings: PlanSettings, request: PlanRequest) -> PlanSettings:
    """Return the settings with the work directory of questions, which has the newest profile, and the links.

    A profile that was only counted, for an earlier question, has no times for a request without datasheets.
    """
    store = Store(settings.work_dir)
    question = store.question
    question.path.mkdir(parents=True, exist_ok=True)
    if written(store.profile) > (written(question.profile) if request.of_datasheet else 0):
        shutil.copyfile(store.profile, question.profile)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(store.links, question.links)
    return replace(settings, profile=replace(settings.profile, work_dir=question.path))
