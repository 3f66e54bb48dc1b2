"""The Control service: takes an operator's calls, gives what the hub knows."""

from __future__ import annotations

import time

from jaxserve.config import ServerConfig
from jaxserve.errors import EngineUnavailable, InvalidRequest
from jaxserve.request import check_float
from jaxserve.server.hub import Hub
from jaxserve.v1 import control_pb2 as pb

MAX_DRAIN_S = 86400.0


class ControlService:
    """One method for each of the proto's."""

    def __init__(self, hub: Hub, config: ServerConfig, model_name: str, version: str) -> None:
        self._hub, self._config, self._model_name, self._version = hub, config, model_name, version
        self._started_s = time.monotonic()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """What is served; UNAVAILABLE until the engine is warm, because the context's length is known only then."""
        facts = self._hub.facts
        if facts is None:
            raise EngineUnavailable(self._hub.why_not_serving())
        return pb.GetModelInfoResponse(
            model=self._model_name,
            model_type=facts.model_type,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            dtype=facts.dtype,
            eos_token_ids=self._hub.text.eos_token_ids,
            has_tokenizer=self._hub.text.tokenizer is not None,
            has_chat_template=self._hub.text.template is not None,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """State and limits; answers at any time."""
        answer = pb.GetServerInfoResponse(
            version=self._version,
            state=pb.ServerState.Name(self._hub.phase),
            state_text=self._hub.phase_text,
            uptime_s=time.monotonic() - self._started_s,
            max_message_bytes=self._config.max_message_bytes,
            max_n=self._config.max_n,
        )
        facts = self._hub.facts
        if facts is not None:
            answer.platform, answer.device_kind, answer.num_devices = (
                facts.platform,
                facts.device_kind,
                facts.num_devices,
            )
            answer.max_num_seqs, answer.max_num_batched_tokens = facts.max_num_seqs, facts.max_num_batched_tokens
            answer.total_pages, answer.page_size_tokens = facts.total_pages, facts.page_size_tokens
            answer.implementations.update(facts.implementations)
        return answer

    async def GetLoad(self, request: pb.GetLoadRequest) -> pb.GetLoadResponse:
        """The engine's last report."""
        stats = self._hub.stats
        return pb.GetLoadResponse(
            live_requests=self._hub.open_streams,
            running_requests=stats.running_requests,
            waiting_requests=stats.waiting_requests,
            total_pages=stats.total_pages,
            live_pages=stats.live_pages,
            cached_pages=stats.cached_pages,
            free_pages=stats.free_pages,
            prompt_tokens_total=stats.prompt_tokens_total,
            generation_tokens_total=stats.generation_tokens_total,
            preemptions_total=stats.preemptions_total,
            step_count=stats.step_count,
            compilations_after_warmup_total=stats.compilations_after_warmup_total,
            prefix_query_tokens_total=stats.prefix_query_tokens_total,
            prefix_hit_tokens_total=stats.prefix_hit_tokens_total,
            evicted_pages_total=stats.evicted_pages_total,
        )

    async def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """End one request."""
        if not request.request_id:
            raise InvalidRequest("request_id", "", "the id of a live request")
        return pb.AbortResponse(aborted=self._hub.front.cancel(request.request_id))

    async def FlushCache(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        """Empty the prefix cache, between two requests."""
        self._hub.flush_cache()
        return pb.FlushCacheResponse()

    async def Drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """Take nothing new; answer when the live requests are done, or the timeout has passed."""
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._config.drain_timeout_s
        check_float("timeout_s", timeout_s, 0.0, MAX_DRAIN_S)
        await self._hub.drained(timeout_s)
        return pb.DrainResponse(live_requests=self._hub.open_streams)
