"""The sharing map: which layer's K/V each layer reads.

    KVSharing.parse("0_0_2s_2s", window=128)

    layer    0 1 2 3
    group 0  ■ ● · ·      ■ owner: projects, rotates and writes K/V, and reads it
    group 1  · · ◧ ○      ● reader: projects only q and reads its owner's K/V
                          ◧ ○ the same, seeing only the last `window` tokens

A map is plain data. It knows neither tensors nor head sizes nor requests: `layout` adds the
geometry, `pool` the memory. Every scheme of the literature is a constructor here and nothing
anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from miniserve.errors import ConfigError


@dataclass(frozen=True)
class KVSharing:
    """`owners[i]` is the layer whose K/V layer i reads; `windows[i]` how far layer i sees.

    A window of W means the token itself and the W - 1 before it; None means all of them. The
    window belongs to the reader: one group may have windowed and full readers.
    Build it with `from_list` (which follows chains to their root) or one of the schemes below;
    the constructor itself accepts only finished maps.
    """

    owners: tuple[int, ...]
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        """Refuse everything that is not a finished map."""
        if not self.owners:
            raise ConfigError("kv_sharing: the map is empty; a model has at least one layer")
        if len(self.windows) != len(self.owners):
            raise ConfigError(
                f"kv_sharing: {len(self.windows)} windows for {len(self.owners)} layers; give one (or None) per layer"
            )
        for layer, owner in enumerate(self.owners):
            if not 0 <= owner < len(self.owners) or self.owners[owner] != owner:
                raise ConfigError(f"kv_sharing: layer {layer} reads layer {owner}, which owns no K/V")
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ConfigError(f"kv_sharing: layer {layer} has window {window}; a window is at least 1 token")
            if window is not None and self.owners[layer] > layer:
                raise ConfigError(f"kv_sharing: layer {layer} reads a layer above it and cannot have a window as well")

    # ---------------------------------------------------------------- what the engine asks

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.owners)

    @cached_property
    def group_owners(self) -> tuple[int, ...]:
        """The layers that write K/V, in order. Group g belongs to `group_owners[g]`."""
        return tuple(layer for layer, owner in enumerate(self.owners) if layer == owner)

    def owns(self, layer: int) -> bool:
        """Whether this layer writes K/V."""
        return self.owners[layer] == layer

    def group_of(self, layer: int) -> int:
        """The index of the layer group whose memory this layer reads."""
        return self.group_owners.index(self.owners[layer])

    def sight(self, layer: int) -> dict[str, Any]:
        """As `Ops.attend` takes it. Who reads a layer above cannot see the token itself (LCKV, 2405.10637, 2.2)."""
        return {"window": self.windows[layer], "diagonal": self.owners[layer] <= layer}

    @cached_property
    def cyclic(self) -> bool:
        """Whether a layer reads one above it: then a token needs all layers of the token before, and goes alone."""
        return any(owner > layer for layer, owner in enumerate(self.owners))

    def readers(self, owner: int) -> tuple[int, ...]:
        """All layers that read this owner's K/V, the owner itself first."""
        return tuple(layer for layer, read in enumerate(self.owners) if read == owner)

    def retention(self, owner: int) -> int | None:
        """How many tokens of this owner's K/V must be kept: the widest reader's window, or None for all."""
        windows = [self.windows[layer] for layer in self.readers(owner)]
        return None if None in windows else max(window for window in windows if window is not None)

    @cached_property
    def cut(self) -> int:
        """The last owner. Once it has written K/V, a token that is not sampled needs no more work."""
        return self.group_owners[-1]

    def __str__(self) -> str:
        """LCKV's text form; `s` marks a windowed reader (`s64` where the windows differ)."""
        distinct = {window for window in self.windows if window is not None}
        return "_".join(
            f"{owner}{'' if window is None else 's' if len(distinct) == 1 else f's{window}'}"
            for owner, window in zip(self.owners, self.windows)
        )

    def with_windows(self, windows: Sequence[int | None]) -> KVSharing:
        """The same owners, other windows."""
        return KVSharing(self.owners, tuple(windows))

    # ---------------------------------------------------------------- lists and text

    @classmethod
    def from_list(cls, reads: Sequence[int], windows: Sequence[int | None] | None = None) -> KVSharing:
        """From one entry per layer: the layer it reads. Chains (2 reads 1 reads 0) end at their root.

        Raises:
            ConfigError: an entry is no layer, or lies on a ring.
        """
        owners = tuple(_root(reads, layer) for layer in range(len(reads)))
        return cls(owners, tuple(windows) if windows is not None else (None,) * len(owners))

    @classmethod
    def parse(
        cls,
        text: str,
        num_layers: int | None = None,
        *,
        window: int | None = None,
        own_windows: Sequence[int | None] | None = None,
    ) -> KVSharing:
        """From text: `none`, `cla:2`, `mlkv:3`, `suffix:10`, `yoco`, or LCKV's `0_0_2s_2s` (also `lckv:...`).

        An entry with `s` sees `window` tokens, with `s64` it sees 64; other layers keep their entry of
        `own_windows` (the model's own windows), by default the whole context.

        Raises:
            ConfigError: unknown scheme, a bad number, the wrong number of layers, or a ring.
        """
        scheme, _, argument = text.strip().partition(":")
        if scheme == "lckv" or re.match(r"\d+s?\d*(_|$)", text.strip()):
            entries = (argument if scheme == "lckv" else text.strip()).split("_")
            return cls._from_entries(entries, num_layers, window, own_windows)
        if num_layers is None:
            raise ConfigError(f"kv_sharing={text!r}: this form needs the number of layers")
        if scheme not in SCHEMES:
            raise ConfigError(
                f"kv_sharing={text!r}: unknown scheme {scheme!r}; use one of {', '.join(SCHEMES)}, "
                "or one entry per layer as in '0_0_2_2'"
            )
        build, wants_number = SCHEMES[scheme]
        if wants_number != argument.isdecimal() or (argument and not wants_number):
            wanted = f"'{scheme}:N' with a whole number N" if wants_number else f"just '{scheme}'"
            raise ConfigError(f"kv_sharing={text!r}: write {wanted}")
        sharing = build(num_layers, int(argument)) if wants_number else build(num_layers)
        return sharing if own_windows is None else sharing.with_windows(own_windows)

    @classmethod
    def _from_entries(
        cls,
        entries: list[str],
        num_layers: int | None,
        window: int | None,
        own_windows: Sequence[int | None] | None,
    ) -> KVSharing:
        if num_layers is not None and len(entries) != num_layers:
            raise ConfigError(f"kv_sharing: {len(entries)} entries for a model of {num_layers} layers; give one each")
        reads: list[int] = []
        windows: list[int | None] = []
        for layer, entry in enumerate(entries):
            match = re.fullmatch(r"(\d+)(?:(s)(\d*))?", entry)
            if match is None:
                raise ConfigError(
                    f"kv_sharing: entry {entry!r} of layer {layer} is not a layer index, optionally followed by 's'"
                )
            reads.append(int(match[1]))
            if match[2]:
                windows.append(int(match[3]) if match[3] else window)
                if windows[-1] is None:
                    raise ConfigError(
                        f"kv_sharing: layer {layer} is windowed ({entry!r}) but no window size is known; "
                        f"set sliding_window in config.json or write {entry}64"
                    )
            else:
                windows.append(own_windows[layer] if own_windows is not None else None)
        return cls.from_list(reads, windows)

    # ---------------------------------------------------------------- schemes

    @classmethod
    def none(cls, num_layers: int) -> KVSharing:
        """Every layer owns its K/V: a plain transformer."""
        return cls.from_list(range(num_layers))

    @classmethod
    def cla(cls, num_layers: int, factor: int) -> KVSharing:
        """Cross-Layer Attention (2405.12981, section 2.2): groups of `factor` layers; the last may be short."""
        if factor < 1:
            raise ConfigError(f"kv_sharing='cla:{factor}': the factor is at least 1")
        return cls.from_list([layer - layer % factor for layer in range(num_layers)])

    @classmethod
    def mlkv(cls, num_layers: int, num_kv_layers: int) -> KVSharing:
        """MLKV (2406.09297): `num_kv_layers` owners; everyone reads the nearest owner below.

        The owners come from the authors' floating-point expression, which an integer rule does not equal
        (30 layers, 22 owners).
        """
        if not 1 <= num_kv_layers <= num_layers:
            raise ConfigError(
                f"num_key_value_layers={num_kv_layers}: a model of {num_layers} layers has 1 to {num_layers} of them"
            )
        owners = [0] + [int((i + 1) * (num_layers / num_kv_layers)) for i in range(num_kv_layers - 1)]
        return cls.nearest_owner(num_layers, owners)

    @classmethod
    def nearest_owner(cls, num_layers: int, owners: Sequence[int]) -> KVSharing:
        """Every layer reads the nearest owner at or below it (MLKV, cla-llama, CLA's dense-front and -back)."""
        strangers = [owner for owner in owners if not 0 <= owner < num_layers]
        if strangers:
            raise ConfigError(
                f"kv_sharing: owner layer {strangers[0]} does not exist in a model of {num_layers} layers"
            )
        if 0 not in owners:
            raise ConfigError("kv_sharing: layer 0 has no owner at or below it; it must own its K/V")
        return cls.from_list([max(o for o in owners if o <= layer) for layer in range(num_layers)])

    @classmethod
    def suffix(cls, num_layers: int, num_readers: int) -> KVSharing:
        """The last `num_readers` layers read the layer before them (Apple AFM, 2507.13575; 'pizza', 2410.14442)."""
        if not 0 <= num_readers < num_layers:
            raise ConfigError(
                f"kv_sharing='suffix:{num_readers}': a model of {num_layers} layers can have 0 to {num_layers - 1} "
                "readers at its end; the layer before them must own K/V"
            )
        last_owner = num_layers - num_readers - 1
        return cls.from_list([min(layer, last_owner) for layer in range(num_layers)])

    @classmethod
    def yoco(cls, num_layers: int) -> KVSharing:
        """YOCO (2405.05254): the upper half reads one K/V, made from what enters the upper half's first layer."""
        return cls.suffix(num_layers, num_layers - num_layers // 2 - 1)

    @classmethod
    def last_of_same_kind(cls, layer_types: Sequence[str], num_shared: int) -> KVSharing:
        """Gemma 3n and 4: the last `num_shared` layers read the last earlier owner of their own layer type."""
        first_shared = len(layer_types) - num_shared
        if not 0 < first_shared <= len(layer_types):
            raise ConfigError(
                f"num_kv_shared_layers={num_shared}: must be between 0 and {len(layer_types) - 1}, "
                "so that at least one layer owns K/V"
            )
        reads = list(range(first_shared))
        for layer in range(first_shared, len(layer_types)):
            same = [j for j in range(first_shared) if layer_types[j] == layer_types[layer]]
            if not same:
                raise ConfigError(
                    f"num_kv_shared_layers={num_shared}: layer {layer} is {layer_types[layer]!r} and "
                    f"none of the {first_shared} layers that own K/V is"
                )
            reads.append(same[-1])
        return cls.from_list(reads)

    @classmethod
    def from_groups(cls, num_layers: int, groups: Sequence[Sequence[int]]) -> KVSharing:
        """Hymba's `kv_reuse_group` (2411.13676): each list is an owner followed by its readers; others own theirs."""
        reads: dict[int, int] = {}
        for group in groups:
            for layer in group:
                if not max(0, group[0]) <= layer < num_layers:
                    raise ConfigError(f"kv_reuse_group: layer {layer} is none, or lies below its owner {group[0]}")
                if layer in reads:
                    raise ConfigError(f"kv_reuse_group: layer {layer} is in two groups")
                reads[layer] = group[0]
        return cls.from_list([reads.get(layer, layer) for layer in range(num_layers)])

    @classmethod
    def relative(cls, offsets: Sequence[int | None]) -> KVSharing:
        """llm-foundry's `reuse_kv_layer_idx` (MixAttention, 2409.15012): a negative offset per reader, else None."""
        for layer, offset in enumerate(offsets):
            if offset is not None and not -layer <= offset < 0:
                raise ConfigError(
                    f"reuse_kv_layer_idx={offset} of layer {layer}: must be negative and reach no further than layer 0"
                )
        return cls.from_list([layer + (offset or 0) for layer, offset in enumerate(offsets)])

    @classmethod
    def acrosskv(cls, num_layers: int, num_kv_layers: int, group_size: int) -> KVSharing:
        """SwiftKV's AcrossKV (2410.03960): from layer `num_kv_layers` on, every `group_size` layers share one K/V."""
        if not 0 <= num_kv_layers <= num_layers:
            raise ConfigError(f"num_key_value_layers={num_kv_layers}: must be between 0 and {num_layers}")
        if group_size < 1:
            raise ConfigError(f"key_value_group_size={group_size}: must be at least 1")
        late = range(num_kv_layers, num_layers)
        return cls.from_list([*range(num_kv_layers), *(i - (i - num_kv_layers) % group_size for i in late)])

    @classmethod
    def sambay(cls, num_hidden_layers: int) -> KVSharing:
        """SambaY (2507.06607), only its attention layers 1, 3, 5, ...: all behind layer L/2 + 1 read that one."""
        return cls.suffix(num_hidden_layers // 2, num_hidden_layers // 4 - 1)


SCHEMES: dict[str, tuple[Callable[..., KVSharing], bool]] = {
    "none": (KVSharing.none, False),
    "cla": (KVSharing.cla, True),
    "mlkv": (KVSharing.mlkv, True),
    "suffix": (KVSharing.suffix, True),
    "yoco": (KVSharing.yoco, False),
}
"""Text name -> (constructor, whether it takes a number after the colon)."""


def _root(reads: Sequence[int], layer: int) -> int:
    """Follow `reads` from a layer to the owner it ends at."""
    path = [layer]
    while reads[path[-1]] != path[-1]:
        target = reads[path[-1]]
        if not isinstance(target, int) or not 0 <= target < len(reads):
            raise ConfigError(
                f"kv_sharing: layer {path[-1]} reads layer {target!r}, which does not exist; "
                f"the model has layers 0 to {len(reads) - 1}"
            )
        if target in path:
            raise ConfigError(
                f"kv_sharing: layer {layer} reads in a ring ({' -> '.join(map(str, [*path, target]))}); "
                "one of these layers must own its K/V by reading itself"
            )
        path.append(target)
    return path[-1]
