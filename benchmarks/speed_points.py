"""Loads `benchmarks/data/speed_points.jsonl` as fit points."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.shared import DATA, rows_of
from planner.hardware.gpus import find_gpu
from planner.models.catalogue import load
from planner.models.families import spec_from_config
from planner.models.module_tree import tree_digest
from planner.models.spec import LinearSpec, ModelSpec
from planner.setup.codec import decode
from planner.setup.interchange import setup_from_dict
from planner.speed.roofline.points import Point
from planner.speed.roofline.types import Conditions

FILE, TREES = DATA / "speed_points.jsonl", DATA / "inline_trees.jsonl.gz"
"""Module trees of the configurations in rows of these files and of multi_gpu_points.jsonl (`tools.build_trees`)."""


def load_points() -> list[Point]:
    return [_point(row) for row in rows_of(FILE)]


def _point(row: dict[str, Any]) -> Point:
    return Point(
        model=model_of(row),
        gpu=find_gpu(row["gpu"]),
        setup=setup_from_dict(row["setup"]),
        tokens_per_s=row["tokens_per_s"],
        group=row["source"],
        key=row["id"],
        conditions=Conditions(**row["conditions"]),
        repeats=tuple(row["repeats"]),
        labels={"model": row["model"], "confidence": row["confidence"], "num_gpus": str(row["num_gpus"])},
    )


@cache
def _kept_trees() -> dict[str, Any]:
    """Digest -> spec as JSON."""
    return {digest: line["spec"] for line in rows_of(TREES) for digest in line["digests"]}


def inline_model(config: dict[str, Any], model_id: str) -> ModelSpec:
    """The model of a row that brings its configuration: a module tree is kept, which a child would take five seconds
    to build."""
    stored = _kept_trees().get(tree_digest(config))
    if stored is None:
        return spec_from_config(config, model_id=model_id, source="inline")
    spec = decode(ModelSpec, stored, TREES.name)
    return replace(spec, model_id=model_id, model_type=config["model_type"], config=config, config_source="inline")


def model_of(row: dict[str, Any]) -> ModelSpec:
    """The model of a row of either file."""
    config = json.dumps(row.get("config"), sort_keys=True)
    return _model(row["model"], config, row.get("experts", ""), row.get("fused_qkv", False))


@cache
def _model(model_id: str, config: str, experts: str, fused_qkv: bool) -> ModelSpec:
    values = json.loads(config)
    spec = load(model_id) if values is None else inline_model(values, model_id)
    if fused_qkv:
        return replace(
            spec, layer_kinds=tuple(replace(kind, linears=_fused(kind.linears)) for kind in spec.layer_kinds)
        )
    return _experts_as_linears(spec) if experts == "linear" else spec


def _fused(linears: tuple[LinearSpec, ...]) -> tuple[LinearSpec, ...]:
    """Query, key and value as one matrix named "qkv"."""
    parts = [linear for linear in linears if linear.role in ("q", "k", "v")]
    whole = replace(parts[0], name="qkv", role="qkv", out_features=sum(linear.out_features for linear in parts))
    return (whole, *(linear for linear in linears if linear.role not in ("q", "k", "v")))


def _experts_as_linears(spec: ModelSpec) -> ModelSpec:
    """The module tree of transformers 4: each expert's gate, up and down are nn.Linear of their own."""
    kinds = []
    for layer in spec.layer_kinds:
        linears: list[LinearSpec] = []
        for linear in layer.linears:
            if linear.module != "parameter":
                linears.append(linear)
            elif linear.role == "gate_up":
                half = replace(linear, module="linear", out_features=linear.out_features // 2)
                linears += [
                    replace(half, role="gate", name=linear.name + ".w1"),
                    replace(half, role="up", name=linear.name + ".w3"),
                ]
            else:
                linears.append(replace(linear, module="linear"))
        kinds.append(replace(layer, linears=tuple(linears)))
    return replace(spec, layer_kinds=tuple(kinds))
