"""``weft.patch``: replace a Hugging Face GPT-2's or Llama's operators by Weft's, and put them back.

Forwards are set on the modules themselves; parameters, module tree and state dict stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import Any

import torch

from weft.core import WeftError
from weft.nn.patching import attention, rules
from weft.nn.patching.loss import causal_loss, without_logits
from weft.nn.patching.report import Report, Row

__all__ = ["Report", "Row", "patch"]
KINDS = (
    *("norm", "embedding", "mlp", "activation", "dropout", "rope", "block"),
    *("attention", "loss", "head"),
)


def patch(
    model: torch.nn.Module,
    *,
    impl: str | None = None,
    skip: Collection[str] = (),
    keep_logits: bool = True,
    dropout: bool = False,
) -> Report:
    """Let a model compute with Weft's operators: same parameters, same state dict, same answers.

    Known are Hugging Face's GPT-2 and Llama, whole; of any other model torch's ``LayerNorm``,
    ``RMSNorm``, ``Embedding`` and ``GELU("tanh")``. Patch before ``torch.compile``.

    Args:
        model: changed in place: its modules' forwards, its config's attention and its loss.
        impl: the implementation that ``weft.ops`` is to use; None is its choice.
        skip: kinds that stay: ``norm``, ``embedding``, ``mlp``, ``activation``, ``rope``,
            ``block``, ``attention``, ``loss``.
        keep_logits: False joins head and loss in training where ``labels=`` is given: the logits
            are never in memory, and the answer's ``logits`` is None.
        dropout: True replaces dropout too. No mask is stored; the random numbers are others.

    Returns:
        A :class:`Report`: what was replaced by what, and what not and why. ``report.undo()`` puts
        everything back, as the end of ``with weft.patch(model):`` does.

    Raises:
        WeftError: ``model`` is no module, a kind is unknown, or nothing in it can be replaced.
    """
    if not isinstance(model, torch.nn.Module):
        raise WeftError("patch: model", expected="a torch.nn.Module", got=type(model).__name__)
    if any("_weft_impl" in vars(module) for module in model.modules()):
        raise WeftError("patch: the model is patched already", hint="first report.undo()")
    for kind in skip:
        if kind not in KINDS:
            raise WeftError("patch: skip", expected="some of " + ", ".join(KINDS), got=repr(kind))
    work = _Patch(model, impl, skip, dropout)
    work.modules()
    work.attention()
    work.loss(keep_logits)
    if not work.report.replaced:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        known = "a Hugging Face GPT-2 or Llama, or a model with LayerNorm, RMSNorm or Embedding"
        why = "; ".join(sorted({f"{r.kind}: {r.reason}" for r in work.report.rows})[:3])
        raise WeftError(
            "patch: nothing in this model can be replaced",
            expected=known,
            got=", ".join(kinds[:8]),
            hint=why or None,
        )
    work.finish()
    return work.report


class _Patch:
    """One patch in the making."""

    def __init__(self, model: Any, impl: str | None, skip: Collection[str], dropout: bool) -> None:
        self.model, self.impl, self.skip = model, impl, skip
        self.dropout = dropout
        self.report = Report()
        self.named: dict[str, Any] = dict(model.named_modules())
        self.covered: set[Any] = set()  # what a replaced parent computes itself

    def modules(self) -> None:
        """Every module with a rule, children's rules before the blocks'."""
        for known, rule in rules.RULES.items():
            for path, module in self.named.items():
                if rules.class_of(module) == known and module not in self.covered:
                    self._replace(path, module, rule)
        for path, module in self.named.items():
            product = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
            if product and module not in self.covered and path != "lm_head":
                self._keep(path, "linear", rules.PRODUCT)

    def _replace(self, path: str, module: Any, rule: rules.Rule) -> None:
        if why := self._why_not(module, rule):
            self._keep(path, rule.kind, why)
            return
        self._set_forward(module, rule.forward)
        self.covered.update(getattr(module, name) for name in rule.inside)
        self.report.rows.append(Row(path=path, kind=rule.kind, by=_named(rule.by)))

    def _why_not(self, module: Any, rule: rules.Rule) -> str:
        if rule.kind in self.skip:
            return "left out: skip"
        if rule.kind == "dropout" and not self.dropout:
            return rules.DROPOUT
        return rules.not_plain(module) or rule.unless(module)

    def attention(self) -> None:
        """Send attention through transformers' interface, whose choice stands in the config."""
        found = {p: m for p, m in self.named.items() if rules.class_of(m) in rules.ATTENTION}
        configs = {}
        for path, module in found.items():
            skipped = "left out: skip" if "attention" in self.skip else ""
            if why := skipped or rules.attention_unless(module):
                self._keep(path, "attention", why)
            else:
                configs[id(module.config)] = module.config
                self._mark(module)
                by = f"{_named('attention')}; a masked call by transformers' sdpa"
                self.report.rows.append(Row(path=path, kind="attention", by=by))
        if configs:
            attention.register()
        for config in configs.values():
            self.report.set(config, "_attn_implementation_internal", attention.NAME)

    def loss(self, keep_logits: bool) -> None:
        """The loss function of a causal model, and its head where logits need not be kept."""
        model = self.model
        if rules.class_of(model) not in rules.CAUSAL:
            return
        if "loss" in self.skip:
            self._keep("", "loss", "left out: skip")
            self._keep("lm_head", "head", "left out: skip")
            return
        if why := rules.loss_unless(model):
            self._keep("", "loss", why)
        else:
            self._mark(model)
            self.report.set(model, "_loss_function", MethodType(causal_loss, model))
            self.report.rows.append(Row(path="", kind="loss", by=_named("cross_entropy")))
        asked = "" if not keep_logits else "the logits are asked for: keep_logits=False joins them"
        if why := why or asked or rules.head_unless(model):
            self._keep("lm_head", "head", why)
        else:
            self._set_forward(model, without_logits)
            by = f"{_named('linear_cross_entropy')} in training"
            self.report.rows.append(Row(path="lm_head", kind="head", by=by))

    def finish(self) -> None:
        """The table in the model's own order."""
        order = {path: number for number, path in enumerate(self.named)}
        self.report.rows.sort(key=lambda row: (order[row.path], row.kind))

    def _set_forward(self, module: Any, forward: Any) -> None:
        self._mark(module)
        self.report.set(module, "forward", MethodType(forward, module))

    def _mark(self, module: Any) -> None:
        if "_weft_impl" not in vars(module):
            self.report.set(module, "_weft_impl", self.impl)

    def _keep(self, path: str, kind: str, reason: str) -> None:
        self.report.rows.append(Row(path=path, kind=kind, reason=reason))


def _named(operators: str) -> str:
    return ", ".join(f"weft.ops.{name}" for name in operators.split(", "))
