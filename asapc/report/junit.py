"""The gate's checks as JUnit XML, which continuous integration servers show as tests.

One test case per check: its class is asapc.<model or site>, a REGRESSION is a failure, an ANOMALOUS
check an error (the test itself went wrong).
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from asapc.report.document import Report
from asapc.report.tables import headline, limit_text

# What XML 1.0 cannot hold, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(report: Report) -> str:
    """The document; without a gate it holds no test case."""
    checks = report.gate.checks
    counts = {
        "tests": str(len(checks)),
        "failures": str(sum(check.verdict == "REGRESSION" for check in checks)),
        "errors": str(sum(check.verdict == "ANOMALOUS" for check in checks)),
    }
    root = ElementTree.Element("testsuites", {"name": "asapc", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "asapc gate", **counts, "skipped": "0"})
    for check in checks:
        attributes = {
            "classname": _text(f"asapc.{check.scope}"),
            "name": _text(f"{check.metric}: {limit_text(check)}"),
            "time": "0",  # servers ask for it; the measuring was one step for all
        }
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if not check.passed:
            tag = "failure" if check.verdict == "REGRESSION" else "error"
            message = _text(check.message)
            problem = ElementTree.SubElement(case, tag, {"type": check.verdict, "message": message})
            problem.text = message
    ElementTree.SubElement(suite, "system-out").text = _text(headline(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _text(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)
