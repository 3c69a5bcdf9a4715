"""HunYuan's mixtures of experts as transformers has them: no sharing, and a token's shares always sum to one."""

from __future__ import annotations

from miniserve.kvcache.sharing import KVSharing
from miniserve.models.config import Fields
from miniserve.models.hunyuan import HunYuanConfig, Model, hunyuan_config

__all__ = ["Model", "parse"]


def parse(fields: Fields) -> HunYuanConfig:
    """Read transformers' config.json; q and k are always normed, and the experts as wide as the shared MLP."""
    size = fields.size("intermediate_size")
    fields = fields.replaced(use_qk_norm=True, num_shared_expert=1, moe_intermediate_size=size)
    return hunyuan_config(fields, KVSharing.none(fields.size("num_hidden_layers")), shares_sum_to_one=True)
