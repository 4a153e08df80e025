"""Several roles of a convolution at once: what they read of the edges' ends is read once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from insum_nn.compiler.api import Joint
from insum_nn.ops.tensor_product_form import Form
from insum_nn.ops.tensor_product_plan import Packed, Plan, plan_of
from insum_nn.ops.tensor_product_spec import others

__all__ = ["JointRoles", "joint_roles"]


class JointRoles:
    """Roles of which one sums over the edges of a node, and the others have a row for each edge.

    Args:
        plans: one for each role, of a single statement.

    Attributes:
        roles: the roles.
        joint: their programs.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.roles = "".join(plan.role for plan in plans)
        self.joint = Joint([plan.statements[0].program for plan in plans])

    def __call__(
        self,
        operands: Mapping[str, Tensor],
        edges: Sequence[Tensor | None],
        rows: Sequence[int],
        key: Hashable,
    ) -> list[Tensor]:
        """The tensors of all roles.

        Args:
            operands: by role.
            edges: receivers and senders.
            rows: of each result.
            key: what decides the shapes of all of these.
        """
        packed: Packed = {}
        named = [plan.single([operands[x] for x in others(plan.role)], edges, packed) for plan in self.plans]
        shapes = [plan.statements[0].out_shape(size) for plan, size in zip(self.plans, rows, strict=True)]
        results = self.joint(named, shapes, key)
        return [p.finish([result], size) for p, result, size in zip(self.plans, results, rows, strict=True)]


def joint_roles(form: Form, wanted: Sequence[str], device: torch.device, dtype: torch.dtype) -> JointRoles | None:
    """Those of some roles that are computed together, remembered; `None` where there are none."""
    owner = next((role for role in "xz" if role in wanted), None)
    # Weights that edges share have no row for each edge.
    rest = [role for role in wanted if role == "y" or (role == "w" and not form.spec.shared)]
    if not form.spec.convolution or owner is None or not rest:
        return None
    roles = "".join((owner, *rest))

    def build() -> tuple[JointRoles | None]:
        plans = [plan_of(form, role, device, dtype, split=False, staged=role == "y") for role in roles]
        single = all(len(plan.statements) == 1 and not plan.feeds for plan in plans)
        return (JointRoles(plans) if single else None,)

    return form.keep(("joint", roles, device, dtype), build)[0]
