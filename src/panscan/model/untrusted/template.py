"""Chat templates, which are programs from a stranger, in Jinja's sandbox with a limit on the work of each rendering.

Jinja's sandbox keeps a template from Python's internals. It does not limit what a template costs: ``'a' * 10**10`` is
one operation. Here every operation counts its work before it is done
(:mod:`panscan.model.untrusted.budget`), and only methods and filters whose work is known can be called: no text formats
and powers, which no known chat template uses. The text of a template within the limits is the one that Transformers
renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from traceback import walk_tb
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from panscan.core import ModelError, SettingError
from panscan.model.untrusted.budget import TemplateBudget, TemplateLimitError

MAX_TEMPLATE = 256 << 10
"""Characters of a chat template."""
_MAX_TIME_FORMAT = 256  # characters of a date format, each of which may write a hundred
_MAX_SEPARATOR = 16  # characters of an indent or separator of JSON

_budget: ContextVar[TemplateBudget] = ContextVar("budget")


def render_template(template: str, source: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """Return the text of a conversation, as Transformers' ``apply_chat_template`` does.

    Args:
        template: chat template of a checkpoint.
        source: the file that it comes from, for messages.
        messages: turns, whose content is a list of parts.
        values: further variables of the template, such as ``bos_token``.

    Raises:
        SettingError: the template rejects the messages.
        ModelError: the template is damaged, fails, or exceeds a limit.
    """
    previous = _budget.set(TemplateBudget(messages))
    try:
        program = _compiled(template)
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **values}
        return _joined(program.generate(messages=messages, **variables))
    except _RejectedError as error:
        raise SettingError(f"messages: the chat template ({source}) rejects them: {error}") from error
    except TemplateSyntaxError as error:
        raise ModelError(f"chat template ({source}), line {error.lineno}: {error.message}") from error
    except TemplateLimitError as error:
        raise ModelError(f"chat template ({source}): {error}: use the template of the original checkpoint") from error
    except (RecursionError, MemoryError) as error:  # Python's compiler raises both
        raise ModelError(f"chat template ({source}): it is nested too deeply") from error
    except Exception as error:  # a template can cause any: it adds texts to numbers, and takes items that do not exist
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ModelError(f"chat template ({source}){_line_of(error)}: {reason[:300]}") from error
    finally:
        _budget.reset(previous)


def _line_of(error: Exception) -> str:
    """Return ``, line N`` of the template that raised an error; nothing if it is not known."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f", line {lines[-1]}" if lines else ""


def _joined(pieces: Iterator[str]) -> str:
    text, size, most = [], 0, _budget.get().max_text
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise TemplateLimitError(f"it writes more than {most:,} characters")
        text.append(piece)
    return "".join(text)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    if len(template) > MAX_TEMPLATE:
        raise TemplateLimitError(f"it has {len(template):,} characters; at most {MAX_TEMPLATE:,} are supported")
    return _Environment().from_string(template)


class _RejectedError(TemplateError):
    """Raised by ``raise_exception`` of a template."""


class _Generation(Extension):
    """The ``{% generation %}`` block of Transformers, which marks answers in training data."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the work of each operation counted, and the functions that Transformers adds."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # constants are folded while a template is compiled, which counts no work
            finalize=_weighed,
        )
        filters = self.filters | {"tojson": _tojson}
        metered = {name: _metered_filter(name, filters[name]) for name in filters.keys() - _EXPENSIVE_FILTERS}
        self.filters = {**metered, _STEP: _step, _WEIGH: _weighed, _COUNT: _counted}
        self.tests = {name: _metered_test(name, function) for name, function in self.tests.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": _new_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = tuple(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.operation()
        budget.weigh(left, right)
        if operator == "*":
            budget.repeat(left, right)
            budget.repeat(right, left)
        elif operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateLimitError("it computes a power, or formats a text with %")
        result = super().call_binop(context, operator, left, right)
        budget.weigh(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - kwargs may hold self
        budget = _budget.get()
        budget.operation()
        if isinstance(__obj, Macro | LoopContext):
            budget.enter()
            result = super().call(__context, __obj, *args, **kwargs)
            budget.depth -= 1
        elif isinstance(__obj, Undefined):
            result = super().call(__context, __obj)  # raises
        else:
            options = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
            if __self._is_method(__obj):
                return _call_method(budget, __obj, args, options)
            budget.weigh(args, [*options.values()])
            result = super().call(__context, __obj, *args, **kwargs)
        budget.weigh(result)
        return result

    def _is_method(self, function: Any) -> bool:
        """Return whether a callable is a method of a value rather than a function that templates may call.

        Raises:
            SecurityError: it is neither.
        """
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, LoopContext) or any(function is known for known in self._functions):
            return False
        if any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
            return True
        raise SecurityError(f"{name or type(function).__name__} cannot be called in a chat template")


def _call_method(budget: TemplateBudget, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a text, a number or a container."""
    owner, name = method.__self__, method.__name__
    if name in _VIEWS:
        return method(*args, **kwargs)
    args = tuple(_as_list(value) for value in args)
    budget.weigh(owner, args, kwargs)
    if (growth := _GROWTH.get(name)) is not None:
        growth(budget, owner, *args, **kwargs)
    result = method(*args, **kwargs)
    budget.weigh(result)
    return result


class _Metering(NodeTransformer):
    """Adds the counting of work to a parsed template, where the environment is not asked otherwise."""

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                step = _counting(_STEP, nodes.Const(True), node)
                node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
                node.test = node.test and nodes.And(step, node.test, lineno=node.lineno)
            case nodes.Output():  # fixed texts become expressions
                node.nodes = [
                    nodes.Const(text.data) if isinstance(text, nodes.TemplateData) else text for text in node.nodes
                ]
            case nodes.Compare():
                node.expr = _counting(_WEIGH, node.expr, node)
                for operand in node.ops:
                    operand.expr = _counting(_WEIGH, operand.expr, node)
            case nodes.Concat():
                node.nodes = [_counting(_WEIGH, child, node) for child in node.nodes]
                return _counting(_WEIGH, node, node)
            case nodes.Pair():
                node.key = _counting(_WEIGH, node.key, node)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _counting(_WEIGH, node, node)
            case nodes.Getitem(arg=nodes.Slice()):
                return _counting(_COUNT, node, node)
            case nodes.Getitem():
                node.arg = _counting(_WEIGH, node.arg, node)
        return node


_HIDDEN = ("_loop_vars", "_block_vars")  # arguments that Jinja's compiler adds to calls
_STEP, _WEIGH, _COUNT = "(step)", "(weigh)", "(count)"  # names that no template can spell


def _counting(name: str, node: nodes.Expr, place: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=place.lineno)


@pass_context
def _step(_: Any, value: Any) -> Any:
    """Count one round of a loop."""
    _budget.get().operation()
    return value


@pass_context
def _weighed(_: Any, value: Any) -> Any:
    """Count a value with everything inside it."""
    budget = _budget.get()
    budget.operation()
    budget.weigh(value)
    return value


@pass_context
def _counted(_: Any, value: Any) -> Any:
    """Count the items of a value."""
    budget = _budget.get()
    budget.operation()
    budget.spend(len(value) if isinstance(value, Sized) else 0)
    return value


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts its work. It takes the context, so Jinja does not call it at compile time."""
    growth, factor = _FILTER_GROWTH.get(name), _FILTER_FACTORS.get(name, 1)
    light, lazy = name in _LIGHT_FILTERS, name in _LAZY_FILTERS

    @pass_context
    def metered(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.operation()
        if not light:
            value = _as_list(value)
        if lazy:
            budget.spend(len(value) if isinstance(value, Sized) else 0)
            budget.weigh(args, kwargs)
        elif not light:
            budget.weigh(value, args, kwargs, factor=factor)
        if growth is not None:
            growth(budget, value, *args, **kwargs)
        result = function(*_passed(function, context), value, *args, **kwargs)
        if not light and not lazy:
            budget.weigh(result)
        return result

    return metered


def _metered_test(name: str, function: Any) -> Callable[..., Any]:
    """Return a test that counts its work."""

    @pass_context
    def metered(context: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.operation()
        if name in _COMPARING_TESTS:
            budget.weigh(args)
        return function(*_passed(function, context), *args, **kwargs)

    return metered


def _passed(function: Callable[..., Any], context: Any) -> tuple[Any, ...]:
    """Return what Jinja passes to a filter or test before its arguments."""
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if kind == "context":
        return (context,)
    if kind == "eval_context":
        return (context.eval_ctx,)
    return (context.environment,) if kind == "environment" else ()


def _as_list(value: Any) -> Any:
    """Return the items of an iterator as a list: only what exists can be weighed."""
    return list(value) if isinstance(value, Iterator) else value


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dictionary: the function ``dict``, without the attributes of Python's type."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Variables that a template assigns inside loops; as in Transformers, without names that begin with ``_``."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        Namespace.__init__(args[0], {})
        for name, value in values.items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name[:40]!r}: rename it")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's shows all values


def _raise_exception(message: Any) -> None:
    raise _RejectedError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORMAT:
        raise TemplateLimitError(f"a date format has at most {_MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _tojson_growth(budget: TemplateBudget, value: Any, *_: Any, **options: Any) -> None:
    indent = options.get("indent") or 0
    sizes = [indent if isinstance(indent, int) else len(indent), *map(len, options.get("separators") or ())]
    if _ or max(sizes) > _MAX_SEPARATOR:
        raise TemplateLimitError(
            f"tojson takes an indent and separators of at most {_MAX_SEPARATOR} characters, by name"
        )
    budget.weigh(value, factor=max(1, 64 * sizes[0]))


def _join_growth(budget: TemplateBudget, values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    budget.repeat(d, len(values) if isinstance(values, Sized) else 0)


def _replace_growth(budget: TemplateBudget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    budget.repeat(new, str(text).count(str(old)))


def _indent_growth(budget: TemplateBudget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    budget.repeat(width if isinstance(width, str) else range(width), 1 + len(str(text).splitlines()))


_METHODS: dict[type, set[str]] = {
    str: set(dir(str))
    - {"center", "encode", "expandtabs", "format", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"},
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    float: {"is_integer"},
}
_VIEWS = {"get", "items", "keys", "values"}  # methods that copy nothing
_GROWTH: dict[str, Callable[..., None]] = {
    "replace": _replace_growth,
    "join": lambda budget, separator, values: _join_growth(budget, values, separator),
}
_FILTER_GROWTH: dict[str, Callable[..., None]] = {
    "indent": _indent_growth,
    "join": _join_growth,
    "replace": _replace_growth,
    "tojson": _tojson_growth,
}
_FILTER_FACTORS = dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), 20)
_LIGHT_FILTERS = {"attr", "count", "d", "default", "first", "last", "length"}
_LAZY_FILTERS = {"items", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
_EXPENSIVE_FILTERS = (
    "batch",
    "center",
    "format",
    "pprint",
    "random",
    "round",
    "slice",
    "striptags",
    "sum",
    "urlize",
    "wordwrap",
    "xmlattr",
)
"""Filters whose work is not linear in their input, or whose result changes. No known chat template uses them."""
_COMPARING_TESTS = {
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "divisibleby",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lower",
    "lt",
    "ne",
    "upper",
}
