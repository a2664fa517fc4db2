"""DeepSpeed's set-up on a node with GPUs and no CUDA toolkit, as launch/env.sh starts it."""

from __future__ import annotations

import json
import os
import re

from support.commands import ROOT, python

SCRIPT = ROOT / "launch/env.sh"

BUILDERS = """
import json, os, sys
import torch, torch.utils.cpp_extension as extension
torch.version.cuda, extension.CUDA_HOME = "13.0", None
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
real_accelerator.ds_accelerator = accelerator = CUDA_Accelerator()
accelerator._lazy_init_class_dict()
for settings in ({}, json.loads(sys.argv[1])):
    os.environ.update(settings)
    raised = 0
    for builder in accelerator.class_dict.values():
        try:
            builder().is_compatible()
        except Exception:
            raised += 1
    print("raised", raised, len(accelerator.class_dict))
"""
"""What DeepSpeed's setup.py asks of its operators, without and with the settings of env.sh."""


def test_deepspeed_is_set_up_without_a_toolkit() -> None:
    exported = re.findall(r"^export (DS_\w+)=(\w+)", SCRIPT.read_text(), re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if "DS_" not in name}
    told = python("-c", BUILDERS, json.dumps(dict(exported)), env=environment)
    assert told.returncode == 0, told.stderr[-2000:]
    counts = [line for line in told.stdout.splitlines() if line.startswith("raised")]
    assert counts == ["raised 7 23", "raised 0 23"]
