"""The gate: rules over an evaluation, how they are written and judged, and the blessing that follows."""

from shardline.components.export_validate.rules.blessing import Blessing, JudgedRule, Verdict
from shardline.components.export_validate.rules.gate import Gate, accuracy_gate, check_min_accuracy, read_gate
from shardline.components.export_validate.rules.judge import judge
from shardline.components.export_validate.rules.rule import METRICS, Rule, parse_rule, parse_rules

__all__ = [
    "METRICS",
    "Blessing",
    "Gate",
    "JudgedRule",
    "Rule",
    "Verdict",
    "accuracy_gate",
    "check_min_accuracy",
    "judge",
    "parse_rule",
    "parse_rules",
    "read_gate",
]
