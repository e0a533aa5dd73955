"""What a checkpoint remembers of its spec, and what a changed spec means for it. Pure, and without secrets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.spec.part import HASHED
from millstream.pipelines.spec.uri import without_secrets

Fingerprint = dict[str, Any]
_HOW_IT_RUNS = {"required", "spool", "send_timeout", "batch_timeout", "connect_timeout", "password_file"}
_HOW_A_SOURCE_RUNS = _HOW_IT_RUNS | {"durability"}
"""It decides when rows are read, not which."""
_ADDED_SINCE = {("fields", "native")}
"""Settings that 0.1.0 did not have, with the value that means what it did: they do not make a spec another one."""


@dataclass(frozen=True, slots=True)
class ChangeVerdict:
    part: str
    compatible: bool
    why: str


def fingerprint(plan: PipelinePlan) -> Fingerprint:
    spec = plan.pipeline.spec
    stateful = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind == "stateful"]
    others = [p for p in (*plan.streaming, *plan.per_batch) if p.processor.kind != "stateful"]
    return {
        "source": {
            "type": spec.source.type,
            "reads": _digest(spec.source.identity()),
            "how": _digest(spec.source, _HOW_A_SOURCE_RUNS),
        },
        "stateful": [{"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in stateful],
        "processors": [{"name": p.name, "type": p.processor.kind_name, "digest": _digest(p.processor)} for p in others],
        "sinks": {s.config.id: {"type": s.type, "digest": _digest(s), "gates": s in plan.gating} for s in spec.sinks},
        "delivery": plan.delivery,
    }


def _digest(part: BaseModel | Mapping[str, Any], left_out: Set[str] = _HOW_IT_RUNS) -> str:
    plain = part.model_dump(mode="json", by_alias=True, context=HASHED) if isinstance(part, BaseModel) else part
    text = json.dumps(_harmless(plain, left_out), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _harmless(value: Any, left_out: Set[str]) -> Any:
    """Without passwords, and without what only decides how long to try: neither changes which rows are written."""
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if key not in left_out}
        return {key: _harmless(inner, left_out) for key, inner in kept.items() if not _is_added(key, inner)}
    if isinstance(value, list):
        return [_harmless(inner, left_out) for inner in value]
    return without_secrets(value) if isinstance(value, str) and "://" in value else value


def _is_added(key: str, value: Any) -> bool:
    return isinstance(value, str) and (key, value) in _ADDED_SINCE


def compare(
    old: Fingerprint, new: Fingerprint, *, in_flight: int | None, waiting: Mapping[str, int]
) -> list[ChangeVerdict]:
    """Each change with its verdict. ``in_flight`` is a batch that will be replayed, ``waiting`` counts batches that an
    optional sink has not taken."""
    if not old:
        return []
    verdicts = [*_source(old["source"], new["source"]), *_state(old["stateful"], new["stateful"])]
    touched = [*_processors(old["processors"], new["processors"]), *_sinks(old["sinks"], new["sinks"], waiting)]
    if old["source"]["how"] != new["source"]["how"] and old["source"]["reads"] == new["source"]["reads"]:
        touched.append(ChangeVerdict("source", True, "its settings changed; what it reads did not"))
    if old["delivery"] != new["delivery"]:
        touched.append(ChangeVerdict("delivery", True, f"{old['delivery']} became {new['delivery']}"))
    if in_flight is not None:
        # The batch may be in a sink already, made by the old spec: what the new one makes of it would not match.
        why = (
            f"; but batch {in_flight} is not committed, and must be replayed by the spec that made it. "
            "Run the old spec once more (`millstream pipeline run --once`), then this one"
        )
        touched = [
            ChangeVerdict(v.part, v.part.startswith("new "), v.why + ("" if v.part.startswith("new ") else why))
            for v in touched
        ]
    return verdicts + touched


def _source(old: Mapping[str, str], new: Mapping[str, str]) -> list[ChangeVerdict]:
    if old["type"] != new["type"]:
        why = f"it was {old['type']} and is {new['type']}: offsets of the one mean nothing to the other"
    elif old["reads"] != new["reads"]:
        why = "it reads from elsewhere now, and the checkpoint's offsets belong to the old place"
    else:
        return []
    return [ChangeVerdict("source", False, why + ". Use another checkpoint, or `millstream pipeline reset`")]


def _state(old: list[Mapping[str, str]], new: list[Mapping[str, str]]) -> list[ChangeVerdict]:
    if [(p["type"], p["digest"]) for p in old] == [(p["type"], p["digest"]) for p in new]:
        return []
    before, after = (", ".join(p["name"] + " " + p["type"] for p in side) or "none" for side in (old, new))
    why = f"state was kept for {before}, and would be kept for {after}: Spark cannot turn one into the other"
    return [ChangeVerdict("stateful processors", False, why + ". Change it back, use another checkpoint, or reset")]


def _processors(old: list[Mapping[str, str]], new: list[Mapping[str, str]]) -> list[ChangeVerdict]:
    before, after = ([(p["type"], p["digest"]) for p in side] for side in (old, new))
    if before == after:
        return []
    changed = [f"{p['name']} {p['type']}" for p, made in zip(new, after, strict=True) if made not in before]
    gone = [f"{p['name']} {p['type']}" for p, made in zip(old, before, strict=True) if made not in after]
    what = f"{', '.join(changed)} changed or came" if changed else f"{', '.join(gone)} went" if gone else "the order"
    return [ChangeVerdict("processors", True, f"{what}; events from the next batch on go through the new ones")]


def _sinks(old: Mapping[str, Any], new: Mapping[str, Any], waiting: Mapping[str, int]) -> list[ChangeVerdict]:
    verdicts = []
    for name in sorted({*old, *new}):
        if name not in old:
            verdicts.append(ChangeVerdict(f"new sink {name}", True, "it gets events from the next batch on"))
        elif name not in new:
            left = waiting.get(name, 0)
            why = (
                f"{left} batches wait on disk for it and would never be delivered. Let it catch up first"
                if left
                else ""
            )
            verdicts.append(ChangeVerdict(f"sink {name}", not left, why or "it is gone; nothing waits for it"))
        elif old[name]["type"] != new[name]["type"] or old[name]["digest"] != new[name]["digest"]:
            verdicts.append(
                ChangeVerdict(f"sink {name}", True, "it changed; events from the next batch on are written the new way")
            )
        elif old[name]["gates"] != new[name]["gates"]:
            role = "gates the checkpoint now" if new[name]["gates"] else "is optional now"
            left = waiting.get(name, 0)
            if left and new[name]["gates"]:
                why = f"it {role}, but {left} batches wait on disk for it. Let it catch up first"
                verdicts.append(ChangeVerdict(f"sink {name}", False, why))
            else:
                verdicts.append(ChangeVerdict(f"sink {name}", True, f"it {role}"))
    return verdicts
