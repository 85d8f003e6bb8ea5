"""Multi-head attention as torch.nn has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import library
from .._util import arguments
from ..ops._linear import linear
from ..ops._scaled_dot_product_attention import scaled_dot_product_attention
from .twin import Twin


class MultiheadAttention(Twin, torch.nn.MultiheadAttention):
    """Attention of several heads between two projections; as `torch.nn.MultiheadAttention`.

    With `need_weights=False` it is by `cupyops.scaled_dot_product_attention`, between two `cupyops.linear`: heads are read
    where the projection has left them, and the result is contiguous. PyTorch's own forward computes what returns weights,
    and raises for what does not fit. On a GPU it also has evaluation without gradients, where PyTorch fuses the module.

    Example:
        >>> layer = cupyops.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.zeros(1, 3, 8)
        >>> y, weights = layer(x, x, x, need_weights=False)
        >>> y.shape, weights
        (torch.Size([1, 3, 8]), None)
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if type(query) is not Tensor:
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            if (node := self._cupyops_leaf(query, key, value, *options)) is not None:
                return node  # type: ignore[no-any-return]
        if need_weights or not self._serves((query, key, value), key_padding_mask, attn_mask, is_causal):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        rows_first = query.dim() == 2 or not self.batch_first
        q, k, v = self._projected(query, key, value)
        if query.dim() == 2:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        is_causal = is_causal and key_padding_mask is None  # it says what attn_mask is, which is not read then
        mask = None if is_causal else self._mask(q.shape[int(rows_first)], key_padding_mask, attn_mask)
        k, v, mask = self._lengthened(k, v, mask, int(not rows_first))
        order = (1, 2, 0, 3) if rows_first else (0, 2, 1, 3)  # batch, heads, rows, width
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(order) for x in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal)
        y = y.permute((2, 0, 1, 3) if rows_first else (0, 2, 1, 3)).flatten(-2)
        y = linear(y, self.out_proj.weight, self.out_proj.bias)
        return y.squeeze(1) if query.dim() == 2 else y, None

    def _serves(self, tensors: tuple[Any, ...], padding: Any, mask: Any, is_causal: bool) -> bool:
        """Return whether the arguments are what they should be, by metadata alone; PyTorch's forward says what is wrong."""
        if not all(isinstance(x, Tensor) and not x.is_nested for x in (*tensors, padding, mask) if x is not None):
            return False
        query, key, value = tensors
        dims, over = query.dim(), int(self.batch_first)  # the dimension that counts rows of a batch
        if dims not in (2, 3) or any(x.dim() != dims for x in tensors) or key.shape[:-1] != value.shape[:-1]:
            return False
        (rows, batch), (keys, batches) = (
            (x.shape[0], 1) if dims == 2 else (x.shape[over], x.shape[1 - over]) for x in (query, key)
        )
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        if widths != (self.embed_dim, self.kdim, self.vdim) or batch != batches:
            return False
        kinds = {m.dtype for m in (padding, mask) if m is not None}
        if len(kinds) > 1 or not all(kind == torch.bool or kind.is_floating_point for kind in kinds):
            return False
        if padding is not None and padding.shape != ((keys,) if dims == 2 else (batch, keys)):
            return False
        if is_causal if mask is None else mask.shape not in ((rows, keys), (batch * self.num_heads, rows, keys)):
            return False
        alike = all(x.dtype == self.out_proj.weight.dtype for x in tensors)
        return (alike or arguments.autocast(query.device)) and not self._is_fused(query, key, value)

    def _is_fused(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether PyTorch has the module in one piece, on a GPU: ours is not measured beside that."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return self.batch_first and query is key and key is value and library.is_wanted(query)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., embed_dim) each; of a tensor that is given twice by one product."""
        bias, size = self.in_proj_bias, self.embed_dim
        if not self._qkv_same_embed_dim:
            weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif key is value and query is key:
            return linear(query, self.in_proj_weight, bias).unflatten(-1, (3, size)).unbind(-2)  # type: ignore[return-value]
        elif key is value:
            first, rest = self.in_proj_weight.split((size, 2 * size))
            b_first, b_rest = (None, None) if bias is None else bias.split((size, 2 * size))
            return linear(query, first, b_first), *linear(key, rest, b_rest).unflatten(-1, (2, size)).unbind(-2)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
        return q, k, v

    def _mask(self, batch: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
        """A mask to add to the scores, or one that is true where a key is seen; PyTorch's are true where it is not."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, self.num_heads)))
        if key_padding_mask is not None:
            masks.append(key_padding_mask.view(batch, 1, 1, -1))
        if not masks:
            return None
        if masks[0].dtype == torch.bool:
            return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
        return masks[0] if len(masks) == 1 else masks[0] + masks[1]

    def _lengthened(self, k: Tensor, v: Tensor, mask: Tensor | None, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned row of `add_bias_kv` and the zeros of `add_zero_attn`, which every query sees."""
        more = []
        if self.bias_k is not None and self.bias_v is not None:
            more.append((self.bias_k.to(k.dtype), self.bias_v.to(v.dtype)))
        if self.add_zero_attn:
            more.append((k.new_zeros(1, 1, self.embed_dim),) * 2)
        for row_k, row_v in more:
            shape = (1, k.shape[1], -1) if rows == 0 else (k.shape[0], 1, -1)
            k, v = torch.cat((k, row_k.expand(shape)), rows), torch.cat((v, row_v.expand(shape)), rows)
            if mask is not None:
                mask = torch.nn.functional.pad(mask, (0, 1), value=float(mask.dtype == torch.bool))
        return k, v, mask
