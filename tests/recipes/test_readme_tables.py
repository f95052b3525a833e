"""The READMEs' tables are what the committed results say."""

import pytest

from recipes import readme
from recipes.common import ROOT


@pytest.mark.parametrize("path", readme.FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_agrees_with_the_results(path):
    text = path.read_text()
    assert readme.TABLE.search(text)
    assert text.count("<!-- table ") == text.count("<!-- end of table -->")
    assert readme.rendered(text) == text, "run `python -m recipes.readme`"


def test_every_table_stands_somewhere():
    found = [match[2] for path in readme.FILES for match in readme.TABLE.finditer(path.read_text())]
    assert set(found) == set(readme.TABLES)


def test_a_table_is_replaced_and_its_surroundings_stay():
    text = "before\n<!-- table step -->\nold\n<!-- end of table -->\nafter\n"
    new = readme.rendered(text)
    assert new.startswith("before\n<!-- table step -->\n| `topoep` over Megatron-LM, throughput |")
    assert new.endswith("|\n<!-- end of table -->\nafter\n")
    with pytest.raises(KeyError):
        readme.rendered(text.replace("step", "nothing"))
