"""What is compared at each pair of widths: our settings by the name of their row, and what they are to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Overrides = Mapping[str, Any]

CONVS: Final = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200")


@dataclass(frozen=True)
class Way:
    """One of our settings.

    Attributes:
        overrides: arguments of `sbonnx.quantize`, including "backend" and "recipe".
        main: compare with the goal.
        rival: compare with the best peer, with as many samples as peers that train.
        only: models to run on; empty: all.
        seeds: number of random seeds; the mean counts.
    """

    overrides: Overrides
    main: bool = False
    rival: bool = False
    only: tuple[str, ...] = ()
    seeds: int = 1


@dataclass(frozen=True)
class PeerWay:
    """One of a peer's settings.

    Attributes:
        peer: a name of `benchmarks.peers.environments.PEERS`.
        method: method of its script.
        w_bit, a_bit: bit widths.
        learns: it trains layer by layer, for which large networks get fewer samples.
        scheme: range scheme, as named by its script.
        only: models to run on; empty: all.
        lacks: reason why the peer does not have this setting; "": it has.
    """

    peer: str
    method: str
    w_bit: int
    a_bit: int = 8
    learns: bool = False
    scheme: str = "min_max"
    only: tuple[str, ...] = ()
    lacks: str = ""


@dataclass(frozen=True)
class Table:
    """One table of accuracy.

    Attributes:
        title: heading.
        about: text above the table.
        models: models of the pack.
        ways: our settings by name of the row.
        peers: peers' settings by name of the row.
        goals: largest allowed loss of the judged metric, by model.
        ahead: names of two of our rows; the first must be better than the second on each model.
    """

    title: str
    about: str
    models: tuple[str, ...]
    ways: Mapping[str, Way]
    goals: Mapping[str, float]
    peers: Mapping[str, PeerWay] = field(default_factory=dict)
    ahead: tuple[str, str] | None = None


ALL_SAMPLES: Final[Overrides] = {"VERIFY.HELD_OUT": 0}
"""Settings of all our rows: no hold-out set, as the peers calibrate on all samples and nothing is verified here."""

QUICK: Final = {"weight_scale": "observer", "W.ROUNDING.GPTQ.BEAMS": 1, "W.ROUNDING.GPTQ.STEPS": 0}
"""Faster GPTQ: one beam instead of sixteen, only coordinate descent afterwards, ranges from the observer."""


_SQNR: Final = "tf_enhanced"
_SQNR_INPUTS: Final = "activations:tf_enhanced"
_MOBILENETS: Final = ("mobilenetv2_tin200",)


def _aimet_nearest(w_bit: int) -> dict[str, PeerWay]:
    """Return the settings of AIMET without training, one for each range scheme."""
    return {
        "AIMET min-max": PeerWay("aimet", "nearest", w_bit),
        "AIMET SQNR": PeerWay("aimet", "nearest", w_bit, scheme=_SQNR),
        "AIMET SQNR activations": PeerWay("aimet", "nearest", w_bit, scheme=_SQNR_INPUTS),
        "AIMET percentile": PeerWay("aimet", "nearest", w_bit, scheme="percentile"),
        "AIMET equalized, SQNR": PeerWay("aimet", "cle+nearest", w_bit, scheme=_SQNR, only=_MOBILENETS),
    }


_W4A8: Final = {"w_bit": 4, "a_bit": 8}
_NEAREST: Final = {"rounding": "nearest", "BIAS_CORRECTION": "none"}


def _w4a8() -> Table:
    """Return the table of per-channel 4-bit weights."""
    return Table(
        "W4A8, a scale and a zero point a channel",
        "gptq stands for gptq with tabu search and coordinate descent, the default below 8 bits; scales by search "
        "where the row does not say otherwise; quick: one candidate, ranges of the observer, coordinate descent alone.",
        CONVS,
        {
            "nearest, min-max": Way({**_W4A8, **_NEAREST, "w_observer": "minmax"}),
            "nearest, mse ranges": Way({**_W4A8, **_NEAREST, "w_observer": "mse"}),
            "default (gptq)": Way(_W4A8, main=True, seeds=5),
            "gptq, ranges of the observer": Way({**_W4A8, "weight_scale": "observer"}),
            "gptq, quick": Way({**_W4A8, **QUICK}, rival=True),
            "gptq, zero points of 0": Way({**_W4A8, "w_qscheme": "per-channel-symmetric"}),
            "adaround by moments": Way({**_W4A8, "rounding": "adaround"}),
            "adaquant": Way({**_W4A8, "rounding": "adaquant"}),
            "gptq, equalized": Way({**_W4A8, "cross_layer": True}),
            "gptq, batch norms tuned": Way({**_W4A8, "bn_tuning": True}, only=("cifar_resnet20",)),
            "auto": Way({**_W4A8, "recipe": "auto"}),
        },
        {"cifar_resnet20": 0.006, "squeezenet11": 0.015, "mobilenetv2_tin200": 0.025},
        _peers_w4a8(),
    )


def _peers_w4a8() -> dict[str, PeerWay]:
    """Return the peers' settings with 4-bit weights."""
    equalized = PeerWay("aimet", "cle+adaround", 4, learns=True, scheme=_SQNR_INPUTS, only=_MOBILENETS)
    return {
        **_aimet_nearest(4),
        "AIMET SeqMSE": PeerWay("aimet", "seqmse", 4, learns=True),
        "AIMET SeqMSE, SQNR activations": PeerWay("aimet", "seqmse", 4, learns=True, scheme=_SQNR_INPUTS),
        "AIMET AdaRound": PeerWay("aimet", "adaround", 4, learns=True),
        "AIMET AdaRound, SQNR": PeerWay("aimet", "adaround", 4, learns=True, scheme=_SQNR),
        "AIMET AdaRound, SQNR activations": PeerWay("aimet", "adaround", 4, learns=True, scheme=_SQNR_INPUTS),
        "AIMET equalized, AdaRound, SQNR activations": equalized,
        "PPQ KL": PeerWay("ppq", "nearest", 4, scheme="kl"),
        "PPQ block LSQ": PeerWay("ppq", "lsq", 4, learns=True, scheme="percentile"),
        "onnxsim GPTQ, MSE": PeerWay("onnxsim", "gptq", 4, scheme="mse"),
        "NNCF": PeerWay("nncf", "nearest", 4, lacks="its ONNX backend quantizes activations with 8-bit weights only"),
        "Quark": PeerWay("quark", "nearest", 4, lacks="it has no 4-bit weights of convolutions"),
    }


_BLOCKS: Final = {"MODE": "weight_only", "w_bit": 4, "block_size": 32}


def _weight_only() -> Table:
    """Return the table of block-wise 4-bit weights with float activations."""
    symmetric = {"w_qscheme": "per-channel-symmetric"}
    return Table(
        "W4 weight-only, blocks of 32",
        "Activations stay float32. The default has a zero point a block. The peers that run here on a CPU have no "
        "rounding of blocks of a MatMul by data.",
        ("minilm_l6",),
        {
            "nearest, min-max": Way({**_BLOCKS, "rounding": "nearest", "w_observer": "minmax"}),
            "nearest, mse ranges": Way({**_BLOCKS, "rounding": "nearest", "w_observer": "mse"}),
            "nearest, mse ranges, symmetric": Way({**_BLOCKS, **symmetric, "rounding": "nearest", "w_observer": "mse"}),
            "hqq": Way({**_BLOCKS, "rounding": "nearest", "weight_scale": "hqq"}),
            "nearest, awq": Way({**_BLOCKS, "rounding": "nearest", "awq": True}),
            "default (gptq)": Way(_BLOCKS, main=True),
            "gptq, scales searched": Way({**_BLOCKS, "weight_scale": "search"}),
            "gptq, symmetric": Way({**_BLOCKS, **symmetric}),
            "gptq, awq": Way({**_BLOCKS, "awq": True}),
        },
        {"minilm_l6": 0.005},
    )


_W4A4: Final = {"w_bit": 4, "a_bit": 4}
_EDGES: Final = {"FIRST_BITS": 8, "LAST_BITS": 8}


def _w4a4() -> Table:
    """Return the table of 4-bit weights and activations."""
    return Table(
        "W4A4",
        "All layers at 4 bits, but for the rows that say that the first and the last have 8, as the papers do.",
        ("cifar_resnet20",),
        {
            "nearest, min-max": Way({**_W4A4, **_NEAREST, "w_observer": "minmax"}),
            "default (gptq)": Way(_W4A4, main=True),
            "gptq, quick": Way({**_W4A4, **QUICK}, rival=True),
            "adaround by moments": Way({**_W4A4, "rounding": "adaround"}),
            "default (gptq), ends 8 bits": Way({**_W4A4, **_EDGES}, main=True),
        },
        {"cifar_resnet20": 0.04},
        {
            "AIMET AdaRound": PeerWay("aimet", "adaround", 4, 4, learns=True),
            "AIMET AdaRound, SQNR": PeerWay("aimet", "adaround", 4, 4, learns=True, scheme=_SQNR),
            "AIMET AdaRound, SQNR activations": PeerWay("aimet", "adaround", 4, 4, learns=True, scheme=_SQNR_INPUTS),
            "PPQ block LSQ": PeerWay("ppq", "lsq", 4, 4, learns=True, scheme="percentile"),
        },
    )


def _mixed() -> Table:
    """Return the table of mixed precision with the same average bit width."""
    wishes = {"MIXED.BUDGET.BITS": 4, "MIXED.WEIGHTS": [2, 4, 8]}
    return Table(
        "Mixed widths",
        "Weights of 2, 4 and 8 bits, 4 on average over all weights, beside 4 everywhere; activations of 8 bits. "
        "Better: less lost of the metric that counts.",
        (*CONVS, "minilm_l6"),
        {
            "4 bits": Way(_W4A8),
            "2, 4 and 8 bits": Way({**_W4A8, **wishes}),
            "2, 3, 4, 5, 6 and 8 bits": Way({**_W4A8, **wishes, "MIXED.WEIGHTS": [2, 3, 4, 5, 6, 8]}, only=CONVS),
        },
        {},
        ahead=("2, 4 and 8 bits", "4 bits"),
    )


ACCURACY: Final[Mapping[str, Table]] = {
    "w4a8": _w4a8(),
    "weight-only": _weight_only(),
    "w4a4": _w4a4(),
    "mixed": _mixed(),
}
