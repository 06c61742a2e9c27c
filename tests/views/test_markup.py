import json

from autopar.views.markup import Markup, escape, join, json_script, tag


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b & c", tag("b", "d")) == "<p>a &lt; b &amp; c<b>d</b></p>"
    assert escape(Markup("<i>")) == "<i>" and join(["<", Markup("<br>")]) == "&lt;<br>"


def test_attributes():
    found = tag("rect", x=1.0, y=2.345678, stroke_width=2, class_='a"b', fill=None)
    assert found == '<rect x="1" y="2.35" stroke-width="2" class="a&quot;b"></rect>'


def test_control_characters_and_lone_surrogates_are_replaced():
    assert escape("a\x00b\ud800c\n") == "a\ufffdb\ufffdc\n"


def test_a_document_cannot_end_its_element():
    document = {"name": "</script><script>alert(1)</script><!--", "and": "&amp;"}
    found = json_script(document, "document")
    inside = found.partition(">")[2].rpartition("</script>")[0]
    assert "<" not in inside and json.loads(inside) == document
