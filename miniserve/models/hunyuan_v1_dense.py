"""The dense HunYuan models as transformers has them: no sharing (`use_cla` is not looked at there, nor here)."""

from __future__ import annotations

from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.hunyuan import HunYuanConfig, Model, hunyuan_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> HunYuanConfig:
    """Read transformers' config.json; q and k are always normed."""
    fields = fields.replaced(use_qk_norm=True, num_experts=1)
    return hunyuan_config(fields, KVSharing.none(fields.size("num_hidden_layers")), shares_sum_to_one=True)
