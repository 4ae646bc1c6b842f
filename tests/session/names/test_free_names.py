"""Free names: which names a cell may need from the notebook."""

import ast
import dis
import inspect
import textwrap

import pytest
from hypothesis import given, strategies as st

from nbparallel.session.names.free_names import find_free_names, is_ipythons
from nbparallel.transfer import code_names


@pytest.mark.parametrize(
    ("cell", "needed", "doubtful"),
    [
        ("y = x + 1", "x", ""),
        ("df.query('a > @low and b < @high')", "df", "low high"),
        ("df.eval(f'c = a * @k + {m}')", "df m", "k"),
        ("def f(df): return df.query('a > @low')", "", "low"),
        ("send('me@home')", "send", ""),
        ("eval('x + 1'); eval('n')", "eval", "x"),
        ("exec('y = x.real\\nz = y')", "exec", "x y"),
        ("eval('no code'); eval('\\\\d')", "eval", ""),
        ("x += 1", "", "x"),
        ("x = 1\nx + y", "y", ""),
        ("x = x", "", "x"),
        ("if c:\n    y = 1\nprint(y)", "c print", "y"),
        ("for i in range(n):\n    a[i]", "range n a", ""),
        ("for i in s: pass\ni", "s", "i"),
        ("for i in i: i", "", "i"),
        ("for i in s:\n    if i: continue\n    b = i\n    b\nelse:\n    b", "s", "b"),
        ("while True:\n    for i in s: break\n    i", "s", "i"),
        ("for i, (a, *b) in s:\n    with c as i.d, f() as e:\n        e, a, b, i\n    e", "s c f", ""),
        ("with a as b:\n    d = b\n    for e in d:\n        continue\nb, d", "a", "d"),
        ("async with a as b:\n    async for i in await b:\n        await i", "a", ""),
        ("for q in s:\n    def f(): return q + g\n    f()", "s g", ""),
        ("try:\n    y = f()\nexcept ValueError as e:\n    print(e)\ny", "f ValueError print", "e y"),
        ("[a * k for a in b if c]", "b k c", ""),
        ("def g(u=default, *, w: note = 1):\n    return u + deep\ng()", "default note deep", ""),
        ("def g():\n    return later\nlater = 1\ng()", "", "later"),
        (
            "class A(B, metaclass=M):\n    m = 1\n    n = m + o\n    def w(self): return deep",
            "B M o deep",
            "m",
        ),
        ("lambda: (lambda: q)", "q", ""),
        ("def f():\n    def g():\n        nonlocal z\n        z = w\n    z = 1", "w", ""),
        ("def f():\n    global g\n    g = v", "v", ""),
        ("del z", "", "z"),
        ("import numpy as np, os.path\nnp.zeros(n), os", "n", ""),
        ("a, (b, *c) = p\na + b + c", "p", ""),
        ("with open(p) as fh:\n    fh.read()", "open p", ""),
        ("await f(x)\nasync for i in s: pass", "f x s", ""),
        ("f'{x!r:>{w}}'", "x w", ""),
        ("(y := x) + y", "x", "y"),
        ("match v:\n    case Point(x=a): print(a)", "v Point print", "a"),
        ("@decorate\ndef f(): pass", "decorate", ""),
        ("%time f(x)", "f x", ""),
        ("%timeit -n 10 -r3 g(z)", "g z", ""),
        ("%time y = f(x)\ny", "f x", "y"),
        ("%%time\nq = h(x)\nq", "h x", ""),
        ("%%timeit s = setup()\nh(s, x)", "setup h x s", ""),
        ("!echo {x} $y {z.shape}", "", "x y z"),
        ("files = !ls {d}\nlen(files)", "len", "d"),
        ("%cd {folder}", "", "folder"),
        ("x?", "", "x"),
        ("%%bash -s $x\necho {y}", "", "s x"),
        ("    indented = y", "y", ""),
        ("_ + Out[3] + _i3 + __name__ + In[2]; exit; get_ipython()", "", ""),
        ("# nothing", "", ""),
        ("", "", ""),
    ],
)
def test_free_names_of_a_cell(cell, needed, doubtful):
    """Names that the cell reads and never binds are needed; where a binding may come first, doubtful."""
    found = find_free_names(cell)
    assert found.needed == set(needed.split())
    assert found.doubtful == set(doubtful.split())


def test_assigned_names_are_known():
    """What the cell binds, deletes, imports or defines is known, `global` in a function included."""
    cell = "a = 1\nfor b in c: pass\nimport d\ndef e():\n    global f\n    f = g = 1\ndel h\n%time i = 1"
    assert find_free_names(cell).assigned == set("abdefhi")


def test_syntax_error_is_one():
    """A cell that is neither Python nor IPython raises SyntaxError, with or without magics in it."""
    for cell in ("for", "%time f(\nfor", "return 1"):
        with pytest.raises(SyntaxError):
            find_free_names(cell)


@pytest.mark.parametrize(
    "name", ["_", "__", "___", "_i", "_ii", "_i12", "_7", "In", "Out", "exit", "__doc__", "_dh"]
)
def test_ipythons_names(name):
    """IPython's own names are recognised."""
    assert is_ipythons(name)


@pytest.mark.parametrize("name", ["x", "_x", "_private", "_i_", "In_", "i1"])
def test_other_names_are_the_users(name):
    """Names that merely look like IPython's are the user's."""
    assert not is_ipythons(name)


def test_instructions_are_those_of_dis():
    """The quick reader of bytecode sees what `dis` sees, long arguments included."""
    many = "\n".join(f"v{i} = w{i}" for i in range(700))
    for source in (many, inspect.getsource(ast), inspect.getsource(textwrap)):
        stack = [compile(source, "<test>", "exec")]
        while stack:
            code = stack.pop()
            expected = [
                (i.opcode, i.arg or 0) for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"
            ]
            got = [(op, arg) for op, arg in code_names.instructions(code) if dis.opname[op] != "CACHE"]
            got = [(op, arg if op >= dis.HAVE_ARGUMENT else 0) for op, arg in got]
            assert got == expected
            stack += [constant for constant in code.co_consts if isinstance(constant, type(code))]


NAMES = st.sampled_from("abcd")
STATEMENTS = st.recursive(
    st.builds("{} = {} + {}".format, NAMES, NAMES, NAMES) | st.builds("{}".format, NAMES),
    lambda inner: st.builds(
        lambda head, body: head + "\n" + textwrap.indent("\n".join(body), "    "),
        st.builds("if {}:".format, NAMES) | st.builds("for {} in ({},):".format, NAMES, NAMES),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.lists(STATEMENTS, min_size=1, max_size=4), st.dictionaries(NAMES, st.integers(0, 1)))
def test_no_needed_name_is_missed(statements, notebook):
    """A cell that runs in the notebook runs with nothing but its free names, and binds the same."""
    cell = "\n".join(statements)
    full = {**dict.fromkeys("abcd", 1), **notebook}
    found = find_free_names(cell)
    given_ = {name: full[name] for name in found.needed | found.doubtful}
    exec(cell, full)
    exec(cell, given_)
    assert {name: full[name] for name in given_ if name in "abcd"} == {
        name: value for name, value in given_.items() if name in "abcd"
    }
