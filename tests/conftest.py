"""Fixes where tests run, before anything imports JAX: on the CPU as 8 devices, and never on a network."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU run says JAX_PLATFORMS=cuda
# Level 0 halves the time that XLA:CPU takes to compile, which is most of the time of these tests.
XLA_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
# Threads of XLA:CPU, which has as many as devices otherwise. Pallas' interpreter runs each warpgroup of a cluster
# as a program of its own, whose barriers block a thread: of eight, seven that wait keep the eighth from starting.
os.environ["NPROC"] = "24"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer warns when a process that used it forks

# The same examples in each run: a failure here is a failure for everybody. No deadline: a first call compiles.
settings.register_profile("house", derandomize=True, database=None, deadline=None, max_examples=50)
settings.load_profile("house")
