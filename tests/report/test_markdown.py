"""The markdown of a report, read by a parser of GitHub's dialect."""

import re
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tests.report.report_page import Element, parse, rows_of
from tests.report.test_html import run_with

from panscan.core.text import clean
from panscan.report import to_markdown


def rendered(text: str) -> Element:
    """Comments, which keep ``@`` and ``#`` from calling somebody, are nothing in it."""
    return parse(MarkdownIt("gfm-like", {"linkify": False}).render(text))


LETTERS = "ab01|\\`*_[]<>~@#&!-+().{}\n$é\U0001f600 "


@given(
    st.text(alphabet=st.sampled_from(LETTERS), min_size=1).filter(lambda text: text.strip() not in ("", "b", "c", "e"))
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("| a | b |\n|---|---|")
@example("`x` ```\n``` <script>x</script> <!-- --> &lt; &#35;")
@example("@somebody #12 ![x](http://y) [z](w) **b** ~~s~~ \\")
@example("***")
@example("___")
@example("a__b _ c_d __e")
@example("\\|")
def test_foreign_text_is_no_markdown(tmp_path: Path, text: str) -> None:
    source = to_markdown(run_with(text, tmp_path))
    document = rendered(source)
    main, details, *_ = document.all("table")
    rows = rows_of(main)
    assert len(rows) == 3
    wanted = clean(text)
    assert "".join(rows[0]["setting"].text.split()).startswith("".join(f"{wanted},".split()))
    assert rows_of(details)[1]["distance from the reference"].text == wanted
    allowed = {"h3", "p", "strong", "ul", "li", "blockquote", "pre", "code", "details", "summary"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert {each.tag for each in document.all()} == allowed
    assert len(list(document.all("pre"))) == 1
    prose = source[: source.rindex("\n\n```")]
    assert not re.search(r"[@#]\w", prose), "nobody is called, no issue is linked"
