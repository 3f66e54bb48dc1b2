"""Operators' calls, health, reflection, message limits and the metrics page of a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.errors import ConfigError
from jaxserve.server.hub import TextParts
from jaxserve.server.link import Failed, Progress, Ready
from jaxserve.v1 import control_pb2 as control_pb
from jaxserve.v1 import inference_pb2 as pb
from tests.fakes.engine import FACTS, ScriptedEngine
from tests.server.harness import CONFIG, Serving, joined, request, serving
from tests.server.test_service import refused

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(server: Serving, service: str = "") -> int:
    """What the health check says."""
    stub = health_pb2_grpc.HealthStub(server.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)).status


async def test_the_model_is_described(text: TextParts) -> None:
    async with serving(text) as server:
        info = await server.control.GetModelInfo(control_pb.GetModelInfoRequest())
        assert info == control_pb.GetModelInfoResponse(
            model="scripted",
            model_type="scripted",
            max_model_len=512,
            vocab_size=512,
            dtype="float32",
            eos_token_ids=[2],
            has_tokenizer=True,
            has_chat_template=True,
        )


async def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    async with serving(TextParts(None, None, (2,))) as server:
        assert (await joined(server.inference.Generate(request([7, 8], max_tokens=3))))[1] == [7, 8, 7]
        for call in (
            server.inference.Generate(request("hello")),
            server.inference.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")])),
            server.inference.Tokenize(pb.TokenizeRequest(text="hello")),
            server.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
        ):
            error = await refused(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "no tokenizer files" in (error.details() or "")
        assert not (await server.control.GetModelInfo(control_pb.GetModelInfoRequest())).has_tokenizer


async def test_the_server_tells_its_state_at_any_time(text: TextParts) -> None:
    async with serving(text, ready=False) as server:
        server.server.hub.on_record(Progress("compiling decode[8]", 0.5))
        info = await server.control.GetServerInfo(control_pb.GetServerInfoRequest())
        assert (info.state, info.state_text) == (control_pb.SERVER_STATE_STARTING, "compiling decode[8]")
        assert (await refused(server.control.GetModelInfo(control_pb.GetModelInfoRequest()))).code() is (
            grpc.StatusCode.UNAVAILABLE
        )
        server.server.hub.on_record(Ready(dataclasses.replace(FACTS, implementations={"paged_decode": "xla"})))
        info = await server.control.GetServerInfo(control_pb.GetServerInfoRequest())
        assert (info.state, info.state_text) == (control_pb.SERVER_STATE_SERVING, "")
        assert dict(info.implementations) == {"paged_decode": "xla"}
        assert (info.max_num_seqs, info.total_pages, info.max_n) == (256, 1024, 8)
        server.server.hub.on_record(Failed("gone", 1))
        info = await server.control.GetServerInfo(control_pb.GetServerInfoRequest())
        assert (info.state, info.state_text) == (control_pb.SERVER_STATE_FAILED, "gone")


async def test_the_load_is_told(text: TextParts) -> None:
    async with serving(text, ScriptedEngine(max_num_seqs=2), step_period_s=None) as server:
        calls = [server.inference.Generate(request([7], max_tokens=400)) for _ in range(5)]
        while len(server.engine.waiting) < 5:
            await asyncio.sleep(0.001)
        server.step()
        load = await server.control.GetLoad(control_pb.GetLoadRequest())
        assert (load.live_requests, load.running_requests, load.waiting_requests) == (5, 2, 3)
        assert load.total_pages == load.live_pages + load.cached_pages + load.free_pages
        for call in calls:
            call.cancel()


async def test_abort_ends_one_stream_with_what_is_there(text: TextParts) -> None:
    async with serving(text) as server:
        mine = server.inference.Generate(request([7], "mine", max_tokens=400))
        other = server.inference.Generate(request([8], "other", max_tokens=50))
        await mine.read()
        assert (await server.control.Abort(control_pb.AbortRequest(request_id="mine"))).aborted
        assert not (await server.control.Abort(control_pb.AbortRequest(request_id="mine"))).aborted
        assert not (await server.control.Abort(control_pb.AbortRequest(request_id="nobody"))).aborted
        _, _, messages = await joined(mine)
        assert messages[-1].choices[0].finish_reason == pb.FINISH_REASON_CANCELLED
        assert (await joined(other))[1] == [8] * 50
        error = await refused(server.control.Abort(control_pb.AbortRequest()))
        assert (error.code(), "request_id" in (error.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_flush_takes_its_turn_among_requests(text: TextParts) -> None:
    async with serving(text) as server:
        live = server.inference.Generate(request([7], max_tokens=50))
        await live.read()
        await server.control.FlushCache(control_pb.FlushCacheRequest())
        assert (await joined(server.inference.Generate(request([8], max_tokens=2))))[1] == [8, 8]
        assert len((await joined(live))[1]) == 49
        assert server.engine.flushes == [1]


async def test_a_flush_needs_an_engine(text: TextParts) -> None:
    async with serving(text, ready=False) as server:
        error = await refused(server.control.FlushCache(control_pb.FlushCacheRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_drain_refuses_new_requests_and_waits_for_the_live_ones(text: TextParts) -> None:
    async with serving(text) as server:
        live = server.inference.Generate(request([7], max_tokens=50))
        await live.read()
        drain = asyncio.ensure_future(server.control.Drain(control_pb.DrainRequest(timeout_s=10)))
        while not server.server.hub.why_not_serving().startswith("the server is draining"):
            await asyncio.sleep(0.001)
        error = await refused(server.inference.Generate(request([8])))
        assert (error.code(), "draining" in (error.details() or "")) == (grpc.StatusCode.UNAVAILABLE, True)
        server.server.refresh_health()
        assert await health(server) == NOT_SERVING
        _, ids, _ = await joined(live)
        assert len(ids) == 49
        assert (await drain).live_requests == 0


async def test_a_drain_while_starting_holds(text: TextParts) -> None:
    async with serving(text, ready=False) as server:
        assert (await server.control.Drain(control_pb.DrainRequest())).live_requests == 0
        server.server.hub.on_record(Ready(FACTS))
        assert "draining" in ((await refused(server.inference.Generate(request([7])))).details() or "")


async def test_a_drain_that_takes_too_long_says_how_many_are_left(text: TextParts) -> None:
    async with serving(text, ScriptedEngine(first_steps=100_000)) as server:
        calls = [server.inference.Generate(request([7])) for _ in range(3)]
        while len(server.engine.live) < 3:
            await asyncio.sleep(0.001)
        assert (await server.control.Drain(control_pb.DrainRequest(timeout_s=0.05))).live_requests == 3
        error = await refused(server.control.Drain(control_pb.DrainRequest(timeout_s=-1)))
        assert "timeout_s: got -1.0, allowed: a number from 0 to 86400" in (error.details() or "")
        for call in calls:
            call.cancel()


async def test_health_is_serving_only_when_warm(text: TextParts) -> None:
    async with serving(text, ready=False) as server:
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(
            health_pb2.HealthCheckRequest(service="jaxserve.v1.Inference")
        )
        assert await health(server) == NOT_SERVING
        assert (await watch.read()).status == NOT_SERVING
        server.server.hub.on_record(Ready(FACTS))
        server.server.refresh_health()
        for service in ("", "jaxserve.v1.Inference", "jaxserve.v1.Control"):
            assert await health(server, service) == SERVING
        assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(server, "other.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        server.server.hub.on_record(Failed("gone", 1))
        server.server.refresh_health()
        assert await health(server) == NOT_SERVING
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_b087_a_hung_engine_is_not_healthy_and_a_busy_one_is(text: TextParts) -> None:
    async with serving(text, step_period_s=None) as server:
        clock = [100.0]
        server.server.hub._clock_s = lambda: clock[0]
        call = server.inference.Generate(request([7], max_tokens=400))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        for _ in range(30):
            clock[0] += 10.0
            server.step()
            server.server.refresh_health()
            assert await health(server) == SERVING
        clock[0] += 130.0
        assert "no step has finished for 130 s" in (server.server.refresh_health() or "")
        assert await health(server) == NOT_SERVING
        server.step()
        server.server.refresh_health()
        assert await health(server) == SERVING
        call.cancel()


async def test_reflection_lists_the_services(text: TextParts) -> None:
    async with serving(text) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names >= {"jaxserve.v1.Inference", "jaxserve.v1.Control", "grpc.health.v1.Health"}


async def test_b089_limits_of_a_message(text: TextParts) -> None:
    """Under the limit but over the context: INVALID_ARGUMENT; over the limit: RESOURCE_EXHAUSTED with both sizes."""
    config = dataclasses.replace(CONFIG, max_message_bytes=8 << 20)
    async with serving(text, config=config) as server:
        info = await server.control.GetServerInfo(control_pb.GetServerInfoRequest())
        assert info.max_message_bytes == 8 << 20
        other = asyncio.create_task(joined(server.inference.Generate(request([7], max_tokens=100))))
        for prompt in ("x" * 4_100_000, "hello world, " * 300_000, [7] * 1_000_000):
            error = await asyncio.wait_for(refused(server.inference.Generate(request(prompt))), 10)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "max_model_len 512" in (error.details() or "")
        error = await refused(server.inference.Generate(request("x" * (9 << 20))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(8 << 20) in (error.details() or "") and str(9 << 20)[:4] in (error.details() or "")
        assert (await other)[1] == [7] * 100


async def test_b089_an_answer_over_the_limit(text: TextParts) -> None:
    config = dataclasses.replace(CONFIG, max_message_bytes=20_000)
    async with serving(text, config=config) as server:
        asked = request([7] * 300, max_tokens=2, prompt_logprobs=20)
        error = await refused(server.inference.Generate(asked))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "allowed: at most 20000" in (error.details() or "")
        await server.idle()


async def test_the_metrics_page_counts_requests(text: TextParts) -> None:
    async with serving(text, config=dataclasses.replace(CONFIG, metrics_port=0)) as server:
        for _ in range(3):
            await joined(server.inference.Generate(request([7], max_tokens=4)))
        address = f"http://127.0.0.1:{server.server.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=5).read().decode())
        assert 'jaxserve:time_to_first_token_seconds_count{model_name="scripted"} 3.0' in page
        assert 'jaxserve:e2e_request_latency_seconds_count{model_name="scripted"} 3.0' in page
        assert 'jaxserve:request_success_total{finished_reason="length",model_name="scripted"} 3.0' in page


async def test_a_port_in_use_is_one_sentence(text: TextParts) -> None:
    async with serving(text) as server:
        config = dataclasses.replace(CONFIG, port=server.server.port)
        with pytest.raises(ConfigError, match=f"--host/--port: got 127.0.0.1:{server.server.port}.*already in use"):
            async with serving(text, config=config):
                pass
        with pytest.raises(ConfigError, match="--host"):
            async with serving(text, config=dataclasses.replace(CONFIG, host="no such host")):
                pass
