"""What people write in a body that is Python or C++: one sentence says what to write."""

import pytest

import cupyops
from cupyops.errors import InputError

SAID = {
    "y = np.exp(x)": "write exp(x)", "y = torch.sigmoid(x)": "write sigmoid(x)", "y = math.sqrt (x)": "write sqrt(x)",
    "y = std::exp(x)": "write exp(x)", "y = ::exp(x)": "write exp(x)", "y = x ** 2": "write x * x, or pow(x, n)",
    "y = (x + 1)**x": "write x * x, or pow(x, n)", "y = x if x > 0 else 0": "condition ? a : b",
    "y = x > 0 and x < 1": "&&", "y = not x": "!", "y = True": "true and false",
    "y := x": "an assignment is written =", "y = x[0]": "there are no indices here",
    "y = x // 2": "begins a comment in C", "float s = 2; y = x // s": "begins a comment in C",
    "y = (x + 1)(2)": "not the name of a function",
}  # fmt: skip


@pytest.mark.parametrize("body", SAID)
def test_it_says_what_to_write(body):
    with pytest.raises(InputError) as caught:
        cupyops.elementwise("not_c(T x) -> T y", body)
    message = str(caught.value)
    assert SAID[body] in message.splitlines()[0] and "not_c.forward:1: " in message
    assert message.endswith(f"  1 | {body}") and "ID(" not in message


@pytest.mark.parametrize("body", [
    "y = x  // np.exp(x), and x ** 2", "y = 2 * x // doubled", "y = x / 2; // 2",
    "y = 0; if (x > 0) y = x; else y = -x", "y = x; /* a[0] := True */", "float and_more = x; y = and_more * 1.5",
])  # fmt: skip
def test_c_with_such_words_is_none_of_these(body):
    cupyops.elementwise("is_c(T x) -> T y", body)


def test_what_is_no_c_is_left_to_the_compiler_where_nothing_is_translated():
    cupyops.elementwise("in_full(T x) -> T y", "y = ::exp(x)", reference=lambda x: x.exp())
