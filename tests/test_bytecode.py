"""What functions load and store is read from bytecode: the same of every Python."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType

import pytest

from asapc.passes.bytecode import loaded_names, questions_of, stored_names
from asapc.program.state import encoded, same_value

# A function f; the attributes it loads, * for any; globals; and what else is found.
FUNCTIONS = {
    "attribute": ("def f(self): return self.a.b", "a b", "", ""),
    "closure": ("def g(t):\n def f(self): return t * self.a\n return f\nf = g(1)", "a", "", ""),
    "nested": ("def f(self):\n def inner(y): return y * self.a * G\n return inner(self.b)",
        "a b", "G", ""),
    "list comprehension": ("def f(self, xs): return [x.p * self.a + G for x in xs if H]",
        "a p", "G H", ""),
    "lambda": ("def f(self, xs): return max(xs, key=lambda x: x.p + G)", "p", "G max", ""),
    "match value": ("def f(self):\n match self.kind:\n  case K.soft: return self.a\n  case 3: return G",
        "a kind soft", "G K", ""),
    "match class": ("def f(self):\n match self.c:\n  case C(tau=t, n=2): return t\n  case D(): return 1",
        "c n tau", "C D", ""),
    "match class by place": ("def f(self):\n match self.c:\n  case C(t): return t", "*", "C", ""),
    "match mapping": ("def f(self):\n match self.c:\n  case {'tau': t, **r}: t\n  case [x, *y]: x.p",
        "c p", "", ""),
    "super": ("class B:\n def f(self, x): return super().f(x) * super().a * super(B, self).b\nf = B.f",
        "a b f", "B super", ""),
    "two locals": ("def f(self, x, y):\n z = x; w = y\n return z.p + w.q", "p q", "", ""),
    "walrus": ("def f(self):\n if (n := self.a) > 3: return n.p\n return (y := self.b).q",
        "a b p q", "", ""),
    "with": ("def f(self):\n with self.lock as l, m.ctx(self.a): return l.p", "a ctx lock p", "m", ""),
    "try": ("def f(self):\n try: self.a\n except m.Error as e: return e.p\n finally: self.done = G",
        "Error a p", "G m", "store:done"),
    "global write": ("def f(self):\n global COUNT\n COUNT = COUNT + 1\n return COUNT", "", "COUNT", ""),
    "store attribute": ("def f(self, x):\n self.a = x; self.b.c = x.shape",
        "b shape", "", "store:a store:c"),
    "store item": ("def f(self, x): self.a['k'] = x; self.a[self.n] += 1", "a n", "", ""),
    "f-string": ("def f(self): return f'{self.a!r:>{self.w}} {G}'", "a w", "G", ""),
    "class body": ("def f(self):\n class C:\n  p = G\n  q = self.a\n  def g(s): return s.r\n return C",
        "a r", "G", ""),
    "del": ("def f(self): del self.a; del self.b.c; del self.d[self.e]", "b d e", "", ""),
    "counts": ("def f(self): self.calls += 1", "", "", "count:calls"),
    "counts and reads": ("def f(self): self.calls += 1; return self.calls", "calls", "", "count:calls"),
    "getattr": ("def f(self): return getattr(self, 'a')", "a", "getattr", ""),
    "getattr default": ("def f(self, x): return getattr(self.c, 'a', self.b(x))", "a b c", "getattr", ""),
    "getattr of item": ("def f(self, i): return getattr(self.c[i], 'a', None)", "a c", "getattr", ""),
    "getattr f-string": ("def f(self, n): return getattr(self, f'a_{n}')", "*", "getattr", ""),
    "hasattr": ("def f(self): return hasattr(self, 'a') and self.a", "a", "hasattr", ""),
    "getattr passed": ("def f(self, names): return list(map(partial(getattr, self), names))",
        "*", "getattr list map partial", ""),
    "getattr renamed": ("def f(self, n):\n g = getattr\n return g(self, n)", "*", "getattr", ""),
    "vars": ("def f(self): return vars(self)['a']", "*", "vars", ""),
    "dict": ("def f(self): return self.__dict__['a']", "*", "", ""),
    "attrgetter": ("def f(self): return operator.attrgetter('a.b')(self)", "*", "operator", ""),
    "own module": ("def f(self): return sys.modules[__name__].TAU", "TAU modules", "TAU modules sys", ""),
    "format": ("def f(self): return '{0.tau} {0.a.b!r} {} 0.5'.format(self)", "a b format tau", "", ""),
    "environ": ("def f(self): return os.environ.get('TAU', '1') + os.getenv('OTHER')",
        "environ get getenv", "os", "environ:1 environ:OTHER environ:TAU"),
    "import": ("def f(self):\n import m.sub as s\n from n import t as u\n return s.p + u",
        "p sub t", "", "import:m.sub import:n"),
    "lookup": ("def __getattr__(self, name):\n if name == 'x': E()\n return self.__dict__['v'][name]",
        "v x", "E", ""),
    "chain": ("def f(self): return self.lo < self.a.x <= self.hi and not self.c", "a c hi lo x", "", ""),
    "star unpack": ("def f(self): a, *b = self.c; return [*self.d, *b], {**self.e}", "c d e", "", ""),
    "async": ("async def f(self):\n async with self.a as b: return await b.c", "a c", "", ""),
    "own mode": ("def f(self, x): return m.drop(x, self.training)", "drop training", "m", ""),
    "other mode": ("def f(self, x): return m.drop(x, self.norm.training)",
        "drop norm training", "m", "modes"),
    "dtype equal": ("def f(self, x): return x.dtype == torch.float16",
        "dtype float16", "torch", "precision"),
    "dtype in": ("def f(self, x): return x.dtype in (torch.float16, torch.bfloat16)",
        "bfloat16 dtype float16", "torch", "precision"),
    "dtype passed": ("def f(self, x): return x.to(self.y.dtype) + x.float()", "dtype float to y", "", ""),
    "finfo eps": ("def f(self, x): return torch.finfo(x.dtype).eps",
        "dtype eps finfo", "torch", "precision"),
    "finfo min": ("def f(self, x): return torch.finfo(x.dtype).min", "dtype finfo min", "torch", ""),
    "dtype of a table": ("def f(self, x): return TABLE[x.dtype]", "dtype", "TABLE", "integers precision"),
    "dtype in a name": ("def f(self, x):\n kind = x.dtype\n return kind in LOW",
        "dtype", "LOW", "integers precision"),
    "dtype passed by name": ("def f(self, x, y):\n d = x.dtype\n return m.zeros(3, dtype=d), y.to(d)",
        "dtype to zeros", "m", ""),
    "dtype of a mask": ("def f(self, m): return m.dtype == torch.bool or m.dtype != torch.uint8",
        "bool dtype uint8", "torch", "integers"),
    "dtype given to a helper": ("def f(self, x): return is_low(x.dtype)",
        "dtype", "is_low", "integers precision"),
    "dtype is floating": ("def f(self, x, dtype): return x.dtype.is_floating_point or dtype is None",
        "dtype is_floating_point", "", ""),
    "same": ("def f(self, x, y): return x is y and x is not None", "", "", "same_objects"),
    "itemsize": ("def f(self, x): return x.element_size()", "element_size", "", "precision"),
}  # fmt: skip


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        yield from codes_in(inner) if isinstance(inner, CodeType) else ()


@pytest.mark.parametrize(("text", "attributes", "names", "more"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_read_of_a_function(text: str, attributes: str, names: str, more: str) -> None:
    everything = codes_in(compile(text, "f.py", "exec"))
    codes = [*codes_in(next(code for code in everything if code.co_name in ("f", "__getattr__")))]
    found, (stored, counted) = loaded_names(codes), stored_names(codes)
    assert found.attributes == (None if attributes == "*" else {*attributes.split()})
    assert found.globals - {"__name__"} == {*names.split()}
    others = {f"environ:{x}" for x in found.environ} | {f"import:{x}" for x in found.imported}
    others |= {f"store:{x}" for x in stored - counted} | {f"count:{x}" for x in counted}
    others |= {"modes"} if found.modes else set()
    assert others.union(*map(questions_of, codes)) == {*more.split()}


def test_functions_of_one_name_are_told_apart() -> None:
    texts = ("s * 1", "s * 2", "s + 2", "t - s", "s - t", "[s for t in s]", "(lambda: 1)", "(lambda: 2)")
    values = [encoded(eval(f"lambda s, t: {text}")) for text in texts]
    assert len({*values}) == len(texts) and all(encoded(eval(f"lambda s, t: {texts[0]}")) == x
                                               for x in values[:1])  # fmt: skip
    (kind, text), (_, other) = values[0], values[-1]  # type: ignore[misc]
    assert same_value((kind, text), (kind, text.replace(text.split()[-1], "3.99-0")))
    assert not same_value((kind, other), (kind, "g " + text.split(" ", 1)[1]))
