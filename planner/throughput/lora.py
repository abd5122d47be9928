"""Which matrices carry adapters, as the speed model groups them."""

from planner.models.spec import LinearSpec
from planner.throughput.inventory import Inventory

ATTENTION_ROLES = frozenset({"q", "k", "v", "qkv", "o"})


def adapted_linears(inv: Inventory, targets: str | tuple[str, ...]) -> tuple[tuple[LinearSpec, int], ...]:
    """Each adapted matrix with how many layers hold it; the output head carries none."""
    return tuple((group.linear, group.count) for group in inv.groups if _adapted(group.linear, targets))


def _adapted(linear: LinearSpec, targets: str | tuple[str, ...]) -> bool:
    if linear.module == "parameter":
        return False
    if targets == "all-linear":
        return True
    if targets == "attention":
        return linear.role in ATTENTION_ROLES
    return linear.leaf in targets or linear.name in targets
