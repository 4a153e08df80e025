"""Several roles of a convolution at once: what they read of the edges' ends is read once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from insum_nn.compiler.api import Joint, JointPaths
from insum_nn.ops.tensor_product_direct import Direct, direct_of
from insum_nn.ops.tensor_product_form import Form
from insum_nn.ops.tensor_product_plan import Packed, Plan, plan_of
from insum_nn.ops.tensor_product_spec import others

__all__ = ["JointRoles", "RolesByPath", "joint_roles", "roles_by_path"]


class JointRoles:
    """Roles that sum over the edges of a node or have a row for each edge.

    Args:
        plans: one for each role, of a single statement.
        deterministic: every run is to give the same bits.

    Attributes:
        roles: the roles.
        joint: their programs.
    """

    def __init__(self, plans: Sequence[Plan], *, deterministic: bool) -> None:
        self.plans = tuple(plans)
        self.roles = "".join(plan.role for plan in plans)
        self.joint = Joint([plan.statements[0].program for plan in plans], deterministic=deterministic)

    def __call__(
        self,
        operands: Mapping[str, Tensor],
        edges: Sequence[Tensor | None],
        rows: Sequence[int],
        key: Hashable,
        apart: Callable[[], list[Tensor]],
    ) -> list[Tensor]:
        """The tensors of all roles.

        Args:
            operands: by role.
            edges: receivers and senders.
            rows: of each result.
            key: what decides the shapes of all of these.
            apart: makes them one by one.
        """
        packed: Packed = {}
        named = [plan.single([operands[x] for x in others(plan.role)], edges, packed) for plan in self.plans]
        shapes = [plan.statements[0].out_shape(size) for plan, size in zip(self.plans, rows, strict=True)]
        results = self.joint.together(named, shapes, key, apart)
        if results is None:
            return apart()
        return [p.finish([result], size) for p, result, size in zip(self.plans, results, rows, strict=True)]


def joint_roles(form: Form, wanted: Sequence[str], device: torch.device, dtype: torch.dtype) -> JointRoles | None:
    """Those of some roles that are computed together, remembered; `None` where there are none."""
    # Weights that edges share have no row for each edge.
    fits = [role for role in wanted if role != "w" or not form.spec.shared]
    fixed = form.spec.options.deterministic or torch.are_deterministic_algorithms_enabled()
    if fixed and "x" in fits and "z" in fits:
        # Both ends of an edge own a sum: one of them alone can be formed without adding to memory.
        fits.remove("z")
    if not form.spec.convolution or len(fits) < 2:
        return None
    roles = "".join(fits)

    def build() -> tuple[JointRoles | None]:
        make = partial(plan_of, form, device=device, dtype=dtype, split=False)
        plans = [make(role, staged=role == "y", in_place=role == "z") for role in roles]
        single = all(len(plan.statements) == 1 and not plan.feeds for plan in plans)
        return (JointRoles(plans, deterministic=fixed) if single else None,)

    return form.keep(("joint", roles, fixed, device, dtype), build)[0]


class RolesByPath:
    """Any roles, which the compiler computes together where it has dense products for each path.

    Args:
        form: the tensor product.
        roles: letters of `ROLES`.
        device: of the operands.
        dtype: of the operands.

    Attributes:
        sources: the statements of each role.
    """

    def __init__(self, form: Form, roles: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        self.roles = tuple(roles)
        self.sources: list[Direct | Plan] = [
            direct_of(form, role, device, dtype, joint=True)
            or plan_of(form, role, device, dtype, split=False, staged=False, in_place=role == "z")
            for role in roles
        ]
        programs = [statement.program for source in self.sources for statement in source.statements]
        outputs = [output for source in self.sources for output in source.outputs]
        self.joint = JointPaths(programs, outputs)

    def __call__(
        self,
        operands: Mapping[str, Tensor],
        edges: Sequence[Tensor | None],
        rows: Sequence[int],
        key: Hashable,
    ) -> dict[str, Tensor] | None:
        """The tensors of all roles; `None`: they are no such products. The arguments are those of `JointRoles`."""
        packed: Packed = {}
        named: list[Mapping[str, Tensor]] = []
        shapes: list[Sequence[int]] = []
        for source, size in zip(self.sources, rows, strict=True):
            given = [operands[role] for role in others(source.role)]
            named += source.all_arguments(given, edges, packed)
            shapes += [statement.out_shape(size) for statement in source.statements]
        results = self.joint(named, shapes, key)
        if results is None:
            return None
        found: dict[str, Tensor] = {}
        for source, size in zip(self.sources, rows, strict=True):
            count = len(dict.fromkeys(source.outputs))
            found[source.role] = source.finish(results[:count], size)
            results = results[count:]
        return found


def roles_by_path(form: Form, roles: Sequence[str], device: torch.device, dtype: torch.dtype) -> RolesByPath:
    """What computes some roles path by path; remembered."""
    key = ("paths", tuple(roles), device, dtype)
    return form.keep(key, lambda: RolesByPath(form, roles, device, dtype))
