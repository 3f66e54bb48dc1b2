"""The command line: flags -> Config, and one function a command. Nothing is decided here."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jaxserve
from jaxserve import app, environment
from jaxserve.client import Client
from jaxserve.config import (
    DTYPES,
    EVICTIONS,
    POLICIES,
    CacheConfig,
    Config,
    ModelConfig,
    RuntimeConfig,
    ScheduleConfig,
    ServerConfig,
)
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.options import LOAD_FORMATS, PLACES, config_from_options
from jaxserve.request import RequestOutput, SamplingParams


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags, with the names that vLLM users know."""
    parser = argparse.ArgumentParser(prog="jaxserve", description="Serve language models from JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the gRPC service", allow_abbrev=False)
    add_model_flags(serve)
    add_server_flags(serve)
    explain = commands.add_parser(
        "explain", help="print which kernel implementation each op gets, and why", allow_abbrev=False
    )
    add_model_flags(explain)
    generate = commands.add_parser("generate", help="complete a prompt, in process or on a server", allow_abbrev=False)
    generate.add_argument("prompt", help="the text to complete; - reads standard input")
    chat = commands.add_parser("chat", help="talk to a model, in process or on a server", allow_abbrev=False)
    chat.add_argument("--system", help="a system message")
    for command in (generate, chat):
        command.add_argument("--address", help="HOST:PORT of a running server, in place of --model")
        command.add_argument("--max-tokens", type=int, default=256)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--top-p", type=float, default=1.0)
        command.add_argument("--top-k", type=int, default=0)
        command.add_argument("--stop", action="append", default=[], help="a stop string; may be given again")
        command.add_argument("--sampling-seed", type=int, help="makes sampling repeatable")
        add_model_flags(command, positional=False)
    return parser


def add_model_flags(parser: argparse.ArgumentParser, *, positional: bool = True, required: bool = True) -> None:
    """What shapes the engine; `required`: whether a positional MODEL must be there."""
    model, cache, schedule, runtime = ModelConfig(""), CacheConfig(), ScheduleConfig(), RuntimeConfig()
    about = "a Hugging Face directory, a GGUF file, or a converted checkpoint"
    if positional:
        parser.add_argument("model", metavar="MODEL", nargs=None if required else "?", help=about)
    else:
        parser.add_argument("--model", help=about)
    flag = parser.add_argument
    flag("--tokenizer", help="a directory with tokenizer files (default: the model's own)")
    flag("--served-model-name", help="the name that clients see (default: the last part of MODEL)")
    flag("--dtype", choices=DTYPES, default=model.dtype, help="of weights and cache")
    flag("--max-model-len", type=int, help="tokens of prompt and output together (default: the model's limit)")
    flag("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights, no files read")
    flag("--seed", type=int, default=model.seed, help="of random weights")
    flag("--max-num-seqs", type=int, default=schedule.max_num_seqs, help="sequences that run at once")
    flag("--max-num-batched-tokens", type=int, default=schedule.max_num_batched_tokens, help="token budget of a step")
    flag("--max-queue-requests", type=int, default=schedule.max_queue_requests, help="waiting requests; more: refused")
    flag("--scheduling-policy", choices=POLICIES, default=schedule.policy, help="who goes first")
    flag("--block-size", type=int, default=cache.page_size_tokens, help="tokens of a cache page")
    flag("--num-pages", type=int, help="pages of the cache (default: from the memory that is free)")
    flag("--cache-memory-gb", type=float, help="size of the cache (default: from the memory that is free)")
    flag("--gpu-memory-utilization", type=float, default=cache.gpu_memory_utilization, help="share of the GPU to take")
    flag(
        "--prefix-cache",
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=cache.prefix_cache,
        help="prompts share cached pages of those that began alike",
    )
    flag("--prefix-cache-eviction", choices=EVICTIONS, default=cache.prefix_cache_eviction, help="what goes first")
    flag("--device", choices=("auto", "cpu", "cuda"), default=runtime.device)
    for name, what in (
        ("tensor", "share each layer"),
        ("expert", "share out the experts"),
        ("data", "run lanes apart"),
    ):
        flag(f"--{name}-parallel-size", type=int, default=1, help=f"devices that {what}")
    flag("--deterministic", action="store_true", help="a request's tokens do not depend on what else runs; slower")
    flag("--attention", default=runtime.attention, help="force an implementation; see `jaxserve explain`")
    flag("--compile-cache-dir", help='where compiled programs are kept; "" turns it off')
    flag("--lower-processes", type=int, help="that help a cold start; 0: none (default: by the host's cores)")
    flag("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """What shapes the service."""
    server = ServerConfig()
    parser.add_argument("--host", default=server.host)
    parser.add_argument("--port", type=int, default=server.port, help="0: a free one, printed at start")
    parser.add_argument("--metrics-port", type=int, help="Prometheus metrics on this port; 0: a free one")
    parser.add_argument("--max-message-mb", type=float, default=server.max_message_bytes / 2**20)
    parser.add_argument("--drain-timeout", type=float, default=server.drain_timeout_s, help="seconds")


def options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are options of the engine or the server, by their flat names."""
    options = {name: value for name, value in vars(args).items() if name in PLACES}
    if options["compile_cache_dir"] is None:
        options["compile_cache_dir"] = environment.default_compile_cache()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors of ours are one sentence on standard error."""
    args = build_parser().parse_args(argv)
    level = getattr(logging, args.log_level.upper())
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for name in ("absl", "jax"):  # orbax tells of every load, JAX of every back end that it does not find
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    environment.prepare(args.device, args.gpu_memory_utilization)
    try:
        return run(args)
    except JaxserveError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads our output has had enough; nor may the interpreter's end complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(args: argparse.Namespace) -> int:
    """One command."""
    if args.command == "serve":
        return app.serve(config_from_options(args.model, options_from(args)), getattr(logging, args.log_level.upper()))
    if args.command == "explain":
        return explain(config_from_options(args.model, options_from(args)))
    if (args.model is None) == (args.address is None):
        raise ConfigError(f"{args.command}: give either --model or --address")
    with open_talker(args) as talker:
        return generate(args, talker) if args.command == "generate" else chat(args, talker)


class Talker(Protocol):
    """What `generate` and `chat` need: a client of a running server, or the library in this process."""

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        """Deltas of a completion."""
        ...

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        """Deltas of an answer."""
        ...


def open_talker(args: argparse.Namespace) -> AbstractContextManager[Talker]:
    """A client for --address, else the model in this process."""
    if args.address is not None:
        return Client(args.address)
    options = options_from(args)
    for name, most in (("max_num_seqs", 4), ("max_num_batched_tokens", 512)):
        options[name] = min(options[name], most)  # one conversation needs no more, and compiles faster
    return jaxserve.LLM(args.model, progress=app.announce, **options)  # resolved after `prepare`: it imports JAX


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """The sampling flags."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=args.stop,
        seed=args.sampling_seed,
    )


def generate(args: argparse.Namespace, talker: Talker) -> int:
    """Print a completion as it comes."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    show(talker.stream(prompt, sampling_from(args)))
    return 0


def chat(args: argparse.Namespace, talker: Talker) -> int:
    """Questions from standard input, answers as they come, with the history; an empty line or end of input ends it."""
    history = [{"role": "system", "content": args.system}] if args.system else []
    params = sampling_from(args)
    while question := ask("> "):
        history.append({"role": "user", "content": question})
        try:
            answer = show(talker.stream_chat(history, params))
        except JaxserveError as error:
            print(f"jaxserve: {error}", file=sys.stderr)
            history.pop()  # the next question starts from what was answered
            continue
        history.append({"role": "assistant", "content": answer})
    return 0


def ask(mark: str) -> str:
    """A line from the user; empty at the end of input."""
    try:
        return input(mark if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def show(deltas: Iterator[RequestOutput]) -> str:
    """Print deltas as they come; returns the whole text."""
    text = ""
    for delta in deltas:
        for output in delta.outputs:
            print(output.text, end="", flush=True)
            text += output.text
    print()
    return text


def explain(config: Config) -> int:
    """Print op, implementation and reason as a table."""
    rows = jaxserve.explain_model(config)
    for row in rows:
        mark = "*" if row.chosen else " "
        print(f"{mark} {row.op:<14} {row.implementation:<12} {row.reason or 'fits'}")
    print("* runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
