"""``weft.patch``: replace the operators of a model, above all Hugging Face's, by Weft's, and undo it.

New forwards are set on the modules themselves; parameters, module tree and state dict do not change.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import Any

import torch

from weft.core import WeftError
from weft.nn.patching import attention, rules, structure
from weft.nn.patching.attention_structure import ROPE, AttentionForm, recognise_attention, recognise_block
from weft.nn.patching.loss import causal_loss, forward_without_logits
from weft.nn.patching.report import Kind, Report, Row

__all__ = ["Kind", "Report", "Row", "patch"]
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
    """Let a model compute with Weft's operators: same parameters, same state dict, same results.

    Hugging Face's GPT-2 is replaced by its classes. Of Llama, Mistral, Qwen, Gemma and others RMS norms,
    gated MLPs, rotations, attentions (with sliding window and cap) and blocks are replaced if a trial call
    gives what Weft computes; of any model torch's ``LayerNorm``, ``RMSNorm``, ``Embedding`` and
    ``GELU("tanh")``. Patch before ``torch.compile``.

    Args:
        model: changed in place: its modules' forwards, its config's attention and its loss.
        impl: implementation of the ``weft.ops`` operators; None leaves the choice to dispatch.
        skip: kinds to leave unchanged: ``norm``, ``embedding``, ``mlp``, ``activation``, ``dropout``,
            ``rope``, ``block``, ``attention``, ``loss``, ``head``.
        keep_logits: False fuses head and loss in training with ``labels=``: the logits are never stored,
            and the output's ``logits`` is None.
        dropout: True replaces dropout too. No mask is stored; the random numbers differ from torch's.

    Returns:
        A :class:`Report` of what was replaced by which operators, and of what was not and why: printed, its
        first line counts the kinds; ``report.kinds`` has them as data, ``report.rows`` each module.
        ``report.undo()`` restores the model, as the end of ``with weft.patch(model):`` does.

    Raises:
        WeftError: ``model`` is no module, a kind is unknown, the model is patched already, or nothing in
            it can be replaced.
    """
    if not isinstance(model, torch.nn.Module):
        raise WeftError("patch: model", expected="a torch.nn.Module", got=type(model).__name__)
    # A second patch would record the first one's forwards as the originals.
    if any("_weft_impl" in vars(module) for module in model.modules()):
        raise WeftError("patch: the model is patched already", hint="call report.undo() first")
    for kind in skip:
        if kind not in KINDS:
            raise WeftError("patch: skip", expected="some of " + ", ".join(KINDS), got=repr(kind))
    patcher = _Patcher(model, impl, skip, dropout)
    patcher.replace_modules()
    patcher.replace_attention()
    patcher.replace_loss(keep_logits)
    report = patcher.report
    if not report.replaced:
        classes = sorted({type(m).__name__ for m in model.modules()})
        reasons = "; ".join(sorted({f"{r.kind}: {r.reason}" for r in report.rows})[:3])
        raise WeftError(
            "patch: nothing in this model can be replaced",
            expected="a Hugging Face GPT-2, Llama, Mistral, Qwen or Gemma, or a model with LayerNorm, "
            "RMSNorm or Embedding",
            got=", ".join(classes[:8]),
            hint=reasons or None,
        )
    patcher.add_remaining()
    # Rows were added rule by rule; the table follows the model.
    order = {path: number for number, path in enumerate(patcher.modules)}
    report.rows.sort(key=lambda row: (order[row.path], row.kind))
    return report


class _Patcher:
    """Applies the rules to one model and records the changes in ``report``."""

    def __init__(self, model: Any, impl: str | None, skip: Collection[str], dropout: bool) -> None:
        self.model, self.impl, self.skip, self.dropout = model, impl, skip, dropout
        self.report = Report()
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.covered: set[Any] = set()  # children that a replaced parent computes itself
        # Before anything is replaced: the trial calls are of the model's own forwards.
        self.attentions = {path: recognise_attention(m) for path, m in self.modules.items()}
        self.blocks = {path: recognise_block(m) for path, m in self.modules.items()}

    def replace_modules(self) -> None:
        """Replace every module with a rule, children before the blocks."""
        for path, module in self.modules.items():
            if rules.class_of(module) in rules.RULES:
                continue
            rule = structure.recognise(module)
            if isinstance(rule, rules.Rule):
                self._replace(path, module, rule)
            elif rule:
                self._add_unchanged(path, "mlp" if list(module.children()) else "norm", rule)
        for known, rule in rules.RULES.items():
            for path, module in self.modules.items():
                if rules.class_of(module) == known and module not in self.covered:
                    self._replace(path, module, rule)
        for path, form in self.attentions.items():
            if isinstance(form, AttentionForm) and not form.rope:
                self._replace(path, self.modules[path], ROPE)
                if "forward" in vars(self.modules[path]):
                    self.report.set(self.modules[path], "_weft_options", form.options)
            elif isinstance(form, AttentionForm):
                self._add_unchanged(path, "rope", form.rope)
        for path, block in self.blocks.items():
            if isinstance(block, rules.Rule):
                self._replace(path, self.modules[path], block)
            elif block:
                self._add_unchanged(path, "block", block)
        for path, module in self.modules.items():
            # transformers' Conv1D is a linear layer with a transposed weight.
            is_linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
            if is_linear and module not in self.covered and path != "lm_head":
                self._add_unchanged(path, "linear", rules.PLAIN_MATMUL)

    def _replace(self, path: str, module: Any, rule: rules.Rule) -> None:
        if rule.kind in self.skip:
            reason = rules.SKIPPED
        elif rule.kind == "dropout" and not self.dropout:
            reason = rules.OTHER_RANDOM_NUMBERS
        else:
            reason = rules.not_plain(module) or rule.reason_against(module)
        if reason:
            self._add_unchanged(path, rule.kind, reason)
            return
        self._set_forward(module, rule.forward)
        # A covered child gets no row and no forward of its own: it is never called.
        self._cover(path, module, rule)
        self._add_replaced(path, rule.kind, _with_prefix(rule.by))

    def _cover(self, path: str, module: Any, rule: rules.Rule) -> None:
        for name in rule.covers:
            child = getattr(module, name)
            if child not in self.covered and "forward" not in vars(child):
                kind = type(child).__name__
                by = f"inside {type(module).__name__}"
                self.report.covered.append(
                    # The path of the model itself is empty, which would leave a dot in front.
                    Row(path=f"{path}.{name}".lstrip("."), kind=kind, by=by, class_name=kind)
                )
            self.covered.add(child)

    def replace_attention(self) -> None:
        """Select Weft in transformers' attention interface; the config has the choice."""
        configs = {}
        for path, module in self.modules.items():
            form = self.attentions[path]
            if rules.class_of(module) not in rules.ATTENTION and form == "":
                continue
            reason = rules.SKIPPED if "attention" in self.skip else form if isinstance(form, str) else ""
            if reason := reason or rules.attention_reason_against(module):
                self._add_unchanged(path, "attention", reason)
            else:
                # Layers share one config, which is changed once.
                configs[id(module.config)] = module.config
                self._set_impl(module)
                has_cap = isinstance(form, AttentionForm) and form.options.get("softcap") is not None
                other = "eager" if has_cap else "sdpa"
                by = f"{_with_prefix('attention')}; calls with a mask by transformers' {other}"
                self._add_replaced(path, "attention", by)
        if configs:
            # transformers is imported only if an attention module is replaced.
            attention.register_attention()
        for config in configs.values():
            self.report.set(config, "_attn_implementation_internal", attention.ATTENTION_NAME)
        for module in self.modules.values():
            is_base = rules.class_of(module) in rules.BASE_MODELS and id(module.config) in configs
            if is_base and not rules.not_plain(module):
                self._set_forward(module, attention.causal_model)

    def replace_loss(self, keep_logits: bool) -> None:
        """Replace a causal model's loss function, and fuse its head with it if no logits are needed."""
        model = self.model
        if rules.class_of(model) not in rules.CAUSAL_MODELS:
            return
        if "loss" in self.skip:
            self._add_unchanged("", "loss", rules.SKIPPED)
            self._add_unchanged("lm_head", "head", rules.SKIPPED)
            return
        if reason := rules.loss_reason_against(model):
            self._add_unchanged("", "loss", reason)
        else:
            self._set_impl(model)
            self.report.set(model, "_loss_function", MethodType(causal_loss, model))
            self._add_replaced("", "loss", _with_prefix("cross_entropy"))
        if not reason and "head" in self.skip:
            reason = rules.SKIPPED
        elif not reason:
            reason = rules.head_reason_against(model) or (rules.LOGITS_RETURNED if keep_logits else "")
        if reason:
            self._add_unchanged("lm_head", "head", reason)
        else:
            self._set_forward(model, forward_without_logits)
            by = f"{_with_prefix('linear_cross_entropy')} in training"
            self._add_replaced("lm_head", "head", by)

    def add_remaining(self) -> None:
        """Add a row for each module that no rule has looked at, with the reason.

        These are the modules without children, and those that compute something with their children: not the
        model itself, torch's containers, and modules around a container (a stack of blocks).
        """
        listed = {row.path for row in self.report.rows}
        for path, module in self.modules.items():
            children = list(module.children())
            is_around = any(isinstance(child, rules.CONTAINERS) for child in children)
            is_passive = isinstance(module, rules.CONTAINERS) or is_around or (children and not path)
            if path not in listed and not is_passive and module not in self.covered:
                kind = "block" if children else "linear" if isinstance(module, torch.nn.Linear) else "other"
                self._add_unchanged(path, kind, rules.reason_without_rule(module))

    def _set_forward(self, module: Any, forward: Any) -> None:
        self._set_impl(module)
        self.report.set(module, "forward", MethodType(forward, module))

    def _set_impl(self, module: Any) -> None:
        if "_weft_impl" not in vars(module):
            self.report.set(module, "_weft_impl", self.impl)

    def _add_replaced(self, path: str, kind: str, by: str) -> None:
        self.report.rows.append(Row(path=path, kind=kind, by=by, class_name=self._class_name(path, kind)))

    def _add_unchanged(self, path: str, kind: str, reason: str) -> None:
        row = Row(path=path, kind=kind, reason=reason, class_name=self._class_name(path, kind))
        self.report.rows.append(row)

    def _class_name(self, path: str, kind: str) -> str:
        """Return the name of a module's class; loss and head belong to the model, not to a class."""
        return kind if kind in ("loss", "head") else type(self.modules[path]).__name__


def _with_prefix(operators: str) -> str:
    return ", ".join(f"weft.ops.{name}" for name in operators.split(", "))
