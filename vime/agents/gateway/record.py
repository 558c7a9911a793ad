"""What a session is on tokens: turns in a tree, found again by ids that we minted, and the trajectories that they make."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson

from vime.errors import VimeError
from vime.sample import FINISHED, Sample, Status

if TYPE_CHECKING:
    from vime.agents.gateway.server import Gateway

MINTED = re.compile(r"_([0-9a-f]{24})(?:_\d+)?$")  # the turn's id, as it ends the ids that a client echoes
IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
PRIVATE = ("turn",)  # keys of a message that are ours, no template's


class Refused(VimeError):
    """An answer to the client in place of a turn: an HTTP status below 500 ends the run, but for 429."""

    def __init__(self, status: int, what: str, code: str = "invalid_request_error"):
        super().__init__(what)
        self.args = (status, what, code)
        self.status, self.code = status, code


@dataclass
class Asked:
    """A request, whatever its provider: `messages` and `tools` in OpenAI's chat form, where an assistant message whose id we minted has its
    turn's id as "turn"; `params` under vLLM's names; `kind` and `agent`: what the client says of itself, if anything."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    model: str = ""
    tool_choice: str = "auto"
    kind: str = ""
    agent: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # what only the provider's own form needs


@dataclass
class Turn:
    """One answer of the policy. `output_ids`, `logprobs` (natural log) and `versions` (-1: unknown) have one entry for each sampled token.

    Its prompt is the whole of `parent` (prompt and answer), if it has one, followed by `context`: tokens that were not sampled.
    """

    id: str
    message: dict[str, Any] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seconds: float = 0.0
    ill_formed: bool = False  # it looks like a tool call and is none that could be parsed: it stayed text
    sampling_mask: list[list[int]] | None = None
    parent: Turn | None = None
    context: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    kind: str = "main"
    agent: str = ""
    history: str = ""  # digest of the messages and tools that it answers
    setting: str = ""  # digest of system prompt and tools
    key: str = ""  # digest of the request
    ended: bool = True  # the model ended it with a token, which is in output_ids
    fork: bool = False  # its prompt repeats what the session has as tokens already
    delivered: bool = False
    ended_at: float = 0.0  # by time.monotonic

    def path(self) -> list[Turn]:
        """This turn and those before it, oldest first."""
        out = [self]
        while (before := out[-1].parent) is not None:
            out.append(before)
        return out[::-1]

    def prompt(self) -> list[int]:
        ids: list[int] = []
        for t in self.path()[:-1]:
            ids += t.context
            ids += t.output_ids
        return ids + self.context

    def to_dict(self) -> dict[str, Any]:
        """For the journal; the parent is named by its id."""
        return vars(self) | {"parent": self.parent.id if self.parent else None}


@dataclass
class Trajectory:
    """A row to train on. `tokens` begin with `prompt_length` tokens before the first that is trained here; `loss_mask`, `logprobs` and `versions`
    (0, 0.0 and -1 for what is context) have an entry for each token after those, as has `sampling_mask` where the server sends it."""

    tokens: list[int]
    prompt_length: int
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    kind: str
    status: Status
    turns: list[str]
    sampling_mask: list[list[int]] | None = None
    response: str = ""

    def to_sample(self, template: Sample) -> Sample:
        """A copy of `template` (its prompt, label, metadata, numbers) with these tokens. Raises: ValueError, as Sample.append_tokens."""
        known = {"agent_kind": self.kind, "agent_turns": len(self.turns)}
        fresh: dict[str, Any] = {"loss_mask": [], "rollout_log_probs": [], "token_versions": [], "response_length": 0}
        s = replace(template, tokens=self.tokens[: self.prompt_length], metadata=template.metadata | known, **fresh)
        start = 0
        for trained, run in groupby(self.loss_mask):
            end = start + len(list(run))
            ids = self.tokens[self.prompt_length + start : self.prompt_length + end]
            if trained:
                support = self.sampling_mask and self.sampling_mask[start:end]
                s.append_tokens(ids, self.logprobs[start:end], versions=self.versions[start:end], sampling_mask=support)
            else:
                s.append_tokens(ids, trainable=False)
            start = end
        s.response, s.status = self.response, self.status
        return s


def text_of(content: Any) -> str:
    """The text of a message's content, blocks joined by line ends. Images are not read; what is unknown is given as its JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(text_of(b) for b in content)
    for key in ("text", "content", "refusal"):
        if isinstance(content, dict) and isinstance(content.get(key), str | list):
            return text_of(content[key])
    if isinstance(content, dict) and content.get("type") in IMAGES:
        return "[image omitted]"
    return orjson.dumps(content).decode()


def digest(*parts: Any) -> str:
    return blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=12).hexdigest()


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in PRIVATE and v not in (None, "", [])}


class Session:
    """One rollout, whatever number of conversations it holds. Everything happens in the Gateway's event loop."""

    def __init__(self, gateway: Gateway, id: str = "", token: str = "", sampling: dict[str, Any] | None = None, metadata: Any = None):
        self.id, self.token = id or secrets.token_hex(16), token or secrets.token_hex(24)
        self.gateway, self.limits = gateway, gateway.limits
        self.sampling, self.metadata = sampling, metadata  # sampling: takes the place of what the client asks for, its length apart
        self.turns: list[Turn] = []  # delivered ones, in that order
        self.index: dict[str, Turn] = {}  # all that were sampled
        self.texts: dict[str, Turn] = {}  # those that have no id the client could echo, by history and text
        self.asked: dict[str, tuple[Turn, asyncio.Future[Turn]]] = {}  # by digest of the request: running ones, and those just answered
        self.slots = asyncio.Semaphore(self.limits.max_concurrency)
        self.requests = self.sampled = self.retries = self.edited = self.images = 0
        self.reward: Any = None
        self.state = "open"

    # ---- where a request goes on

    def _walk(self, asked: Asked) -> Iterator[tuple[str, Turn | None]]:
        """For each message the digest of all before it, and the turn that it is."""
        h = blake2b(orjson.dumps(asked.tools, option=orjson.OPT_SORT_KEYS), digest_size=12)
        for m in asked.messages:
            before = h.hexdigest()
            turn = self._turn_of(m, before) if m["role"] == "assistant" else None
            if turn is not None and not turn.delivered:  # whoever echoes an answer has got it
                self.deliver(turn)
            yield before, turn
            h.update(f"turn {turn.id}".encode() if turn else orjson.dumps(_plain(m), option=orjson.OPT_SORT_KEYS))
        yield h.hexdigest(), None

    def _turn_of(self, message: dict[str, Any], before: str) -> Turn | None:
        named = message.get("turn") or next(filter(None, (minted(c.get("id")) for c in message.get("tool_calls") or [])), None)
        return self.index.get(named) if named else self.texts.get(digest(before, str(message.get("content") or "").strip()))

    async def _prepare(self, turn: Turn, asked: Asked) -> None:
        """Find the turn's parent, by ids; render what comes after it."""
        if self.state != "open":
            raise Refused(409, "the session is closed", "session_closed")
        messages, template = asked.messages, self.gateway.template
        *known, (turn.history, _) = list(self._walk(asked))
        first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        turn.setting = digest(messages[:first], asked.tools)
        at = next((i for i in reversed(range(len(known))) if known[i][1] and known[i][0] == known[i][1].history), None)  # type: ignore[union-attr]
        last = max((i for i, (_, t) in enumerate(known) if t), default=None)
        parent = None if at is None else known[at][1]
        ids = None
        if parent is not None and at is not None:
            ids = template.delta(parent, messages[at + 1 :])
            self.edited += _said(messages[at]) != _said(parent.message)
        if ids is None:
            parent, ids = None, await asyncio.to_thread(template.full, messages, asked.tools)
        turn.parent, turn.context, turn.agent = parent, ids, asked.agent
        self.images += sum("[image omitted]" in str(m.get("content")) for m in (messages if at is None else messages[at + 1 :]))
        turn.fork = last is not None and (parent is None or at != last)
        turn.kind = self._kind(turn, asked, [t for _, t in known if t], known[-1][0] if known else "")
        turn.fork |= any(t.parent is parent and t.kind == turn.kind for t in self.index.values()) if parent else False
        turn.prompt_tokens = len(ids) + (parent.prompt_tokens + len(parent.output_ids) if parent else 0)

    def _kind(self, turn: Turn, asked: Asked, known: list[Turn], before: str) -> str:
        if asked.kind:
            return asked.kind
        mains = [t for t in self.turns if t.kind == "main"]
        if known:
            if not asked.tools and mains and any(t.setting != turn.setting for t in known):
                return "compaction"  # a conversation told anew, without the tools it had
            if asked.messages[-1]["role"] == "user" and any(t.history == before for t in self.turns):
                return "compaction"  # what was answered before is asked again, with more at its end
            base = known[-1]
            if base.kind in ("compaction", "title") and turn.parent is base:  # that was none: nobody goes on from one
                base.kind = base.parent.kind if base.parent else "main"
            return base.kind
        return "main" if not asked.agent and (not mains or mains[0].setting == turn.setting) else "subagent"

    # ---- asking the policy

    async def turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, params: dict[str, Any] | None = None,
                   kind: str = "") -> Turn:  # fmt: skip
        """Sample the next assistant message in this process; append `turn.message` to the messages as it is. Two calls are two samples.
        Raises: Refused (closed, budget, context), EngineDown."""
        texts = [m | {"content": text_of(m.get("content"))} for m in messages]
        turn, task = self.ask(Asked(texts, tools or [], params or {}, kind=kind), "")
        try:
            await task
        except asyncio.CancelledError:
            task.cancel()
            if self.state == "open":
                raise
            raise Refused(409, "the session is closed", "session_closed") from None
        self.deliver(turn)
        return turn

    def ask(self, asked: Asked, key: str) -> tuple[Turn, asyncio.Future[Turn]]:
        """Begin a turn, or join the one that the same request (`key`, if any) began. Raises: Refused."""
        now = time.monotonic()
        self.asked = {k: v for k, v in self.asked.items() if not v[0].delivered or now - v[0].ended_at < self.limits.retry_window}
        if self.state != "open":
            raise Refused(409, "the session is closed", "session_closed")
        if key in self.asked:
            turn, task = self.asked[key]
            if not (task.done() and (task.cancelled() or task.exception())):
                self.retries += 1
                return turn, task
        if self.requests >= self.limits.max_requests:
            raise Refused(400, f"this session has made its {self.limits.max_requests} requests (gateway.max_requests)", "budget_exceeded")
        self.requests += 1
        turn = Turn(secrets.token_hex(12), key=key)
        task = asyncio.create_task(self._run(turn, asked))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # whoever asked may be gone
        self.asked[key or turn.id] = turn, task
        return turn, task

    async def _run(self, turn: Turn, asked: Asked) -> Turn:
        async with self.slots:
            start = time.monotonic()
            await self._prepare(turn, asked)
            await self.gateway.sample(self, turn, asked)
            turn.ended_at = time.monotonic()
            turn.seconds = turn.ended_at - start
        self.adopt(turn)
        self.gateway.write({"e": "turn", "session": self.id, "turn": turn.to_dict()})
        return turn

    def adopt(self, turn: Turn) -> None:
        self.index[turn.id] = turn
        if not turn.message.get("tool_calls"):
            self.texts[digest(turn.history, str(turn.message.get("content") or "").strip())] = turn
        if turn.delivered:
            self.turns.append(turn)

    def deliver(self, turn: Turn) -> None:
        """The client has it: from now on it counts."""
        if not turn.delivered and self.state == "open":
            turn.delivered = True
            self.turns.append(turn)
            self.gateway.write({"e": "delivered", "session": self.id, "turn": turn.id})

    # ---- what comes of it

    def trajectories(self) -> list[Trajectory]:
        """Rows in which each delivered token of the trained kinds is trained once, in the first that has it: a row is the path to a turn after
        which none of its kind comes, so turns of several kinds never share one."""
        done: set[str] = set()
        out = []
        gone_on = {(t.parent.id, t.kind) for t in self.turns if t.parent}
        for leaf in self.turns:
            if (leaf.id, leaf.kind) in gone_on or leaf.kind not in self.limits.train_kinds:
                continue
            path = leaf.path()
            trained = {t.id for t in path if t.kind == leaf.kind and t.delivered} - done
            done |= trained
            out.append(self._row(path, trained, leaf))
        return out

    def _row(self, path: list[Turn], trained: set[str], leaf: Turn) -> Trajectory:
        ids, mask, lps, versions, support = list[int](), list[int](), list[float](), list[int](), list[list[int]]()
        for t in path:
            n, m, learn = len(t.context), len(t.output_ids), t.id in trained
            ids += [*t.context, *t.output_ids]
            mask += [0] * n + [int(learn)] * m
            lps += [0.0] * n + (t.logprobs if learn else [0.0] * m)
            versions += [-1] * n + (t.versions if learn else [-1] * m)
            support += [[]] * n + (t.sampling_mask if learn and t.sampling_mask is not None else [[]] * m)
        start = mask.index(1)
        status = Status.ABORTED if self.state == "aborted" else FINISHED.get(leaf.finish_reason, Status.FAILED)
        masks = support[start:] if any(t.sampling_mask is not None for t in path) else None
        text = self.gateway.tokenizer.decode(ids[start:])
        turns = [t.id for t in path if t.id in trained]
        return Trajectory(ids, start, mask[start:], lps[start:], versions[start:], leaf.kind, status, turns, masks, text)

    def metrics(self, rows: list[Trajectory] | None = None) -> dict[str, float]:
        """agent/trainable_fraction: of the delivered tokens of trained kinds. agent/masked_tokens: delivered, not trained, whatever the kind."""
        rows = self.trajectories() if rows is None else rows
        trained = sum(sum(r.loss_mask) for r in rows)
        wanted = sum(len(t.output_ids) for t in self.turns if t.kind in self.limits.train_kinds)
        delivered, n = sum(len(t.output_ids) for t in self.turns), len(self.turns)
        out: dict[str, float] = {
            "turns": n, "rows": len(rows), "sampled_tokens": self.sampled, "trained_tokens": trained, "masked_tokens": delivered - trained,
            "undelivered_tokens": self.sampled - delivered, "trainable_fraction": trained / wanted if wanted else 1.0,
            "fork_rate": sum(t.fork for t in self.turns) / n if n else 0.0, "ill_formed": sum(t.ill_formed for t in self.turns),
            "echo_edited": self.edited, "retries": self.retries, "images_omitted": self.images,
        }  # fmt: skip
        out |= {f"{kind}_turns": sum(t.kind == kind for t in self.turns) for kind in ("subagent", "compaction", "title")}
        return {f"agent/{k}": v for k, v in out.items()}

    def abort(self) -> list[Trajectory]:
        """As finish(), of a rollout that failed: the rows' status says so."""
        return self.finish("aborted")

    def finish(self, state: str = "finished") -> list[Trajectory]:
        """Close the session: running requests end, later ones get a 4xx. Returns its rows, which the Gateway forgets."""
        if self.state == "open":
            self.state = state
            for _, task in self.asked.values():
                task.cancel()
            self.asked.clear()
            self.gateway.forget(self)
        return self.trajectories()


def minted(text: Any) -> str | None:
    """The turn that an echoed id belongs to."""
    m = MINTED.search(text) if isinstance(text, str) else None
    return m[1] if m else None


def _said(message: dict[str, Any]) -> tuple[str, list[Any]]:
    calls = [(c["function"]["name"], loaded(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return str(message.get("content") or "").strip(), calls


def loaded(arguments: Any) -> Any:
    try:
        return orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return arguments
