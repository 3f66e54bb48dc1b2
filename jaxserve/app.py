"""Wires the front: flags -> text rooms, the engine's process and the gRPC service. Never imports JAX.

What needs JAX is wired in `engine_app`, which runs in a process of its own for the service and in ours for the library.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from checkpoints.files import model_directory
from jaxserve.config import Config, check_ranges
from jaxserve.server.hub import TextParts
from jaxserve.server.link import FrontSide
from jaxserve.server.run import FrontParts, serve_front
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import load_tokenizer, read_eos_ids

ENGINE_EXIT_S = 15.0


def package_version() -> str:
    """The installed package's version; a checkout that is not installed says so."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "not installed"


def text_parts(config: Config) -> TextParts:
    """Tokenizer, chat template and eos ids of the model, or of --tokenizer."""
    model_folder = model_directory(config.model.model)
    folder = Path(config.model.tokenizer) if config.model.tokenizer else model_folder
    tokenizer = load_tokenizer(folder)
    template = None
    if tokenizer is not None and tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return TextParts(tokenizer, template, read_eos_ids(model_folder, tokenizer))


def model_name(config: Config) -> str:
    """The name that clients see."""
    return config.model.served_model_name or Path(config.model.model).resolve().name


def announce(line: str) -> None:
    """One line for the person who started the server."""
    print(f"jaxserve: {line}", file=sys.stderr, flush=True)


def serve(config: Config, log_level: int) -> int:
    """Run the service until a signal or the engine's end; returns the exit code."""
    check_ranges(config)
    parts = FrontParts(
        model_name=model_name(config),
        text=text_parts(config),
        version=package_version(),
        announce=announce,
        step_timeout_s=config.schedule.step_timeout_s,
        max_queue_requests=config.schedule.max_queue_requests,
    )
    return asyncio.run(run_front(config, parts, log_level))


async def run_front(config: Config, parts: FrontParts, log_level: int) -> int:
    """The engine's process and the front beside it; when this returns, neither runs any more."""
    link = FrontSide()
    await link.listen()
    process = start_engine(config, link, log_level)
    ended = os.pidfd_open(process.pid)
    try:
        return await serve_front(config.server, parts, link, ended)
    finally:
        os.close(ended)
        await asyncio.to_thread(end_process, process)


def start_engine(config: Config, link: FrontSide, log_level: int) -> subprocess.Popen[bytes]:
    """Start `python -m jaxserve.engine_app`, in a session of its own so that Ctrl-C reaches only the front."""
    command = [sys.executable, "-m", "jaxserve.engine_app"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((config, link.address, link.authkey, log_level)))
    process.stdin.close()
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was told to end; kill it if it does not."""
    try:
        process.wait(ENGINE_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
