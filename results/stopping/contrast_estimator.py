"""Estimation of a contrast as the same weighted sum of configurations at every seed.

The weights are those of matched pairs, or of least squares in a partial design.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..contrasts import STRATUM_AXES, Contrast
from ..designs.design_option import Design
from ..designs.design_space import is_estimable

LevelMap = Mapping[str, str]
"""Level by axis of a configuration: all its axes, without the seed."""
ZERO_WEIGHT = 1e-9


class ContrastEstimator:
    """Computes the weight of each configuration in the estimate of a contrast.

    A configuration is a combination of levels without the seed. `groups` holds arrays of configuration indices that are
    usable only together: the two of a matched pair, or one cell of a partial design. It is empty if no pair exists or
    the design cannot estimate the contrast.
    """

    def __init__(self, configurations: Sequence[LevelMap], contrast: Contrast, design: Design | None) -> None:
        """Group the configurations by matched pairs, or by cells if the sweep has a partial design.

        A design of which no allowed combination is missing is treated as a complete grid. The stratum (the axis whose
        levels are weighted equally) is the first of attn_type and memory that the contrast does not fix and that
        differs between configurations.

        Args:
            configurations: levels of each configuration.
            contrast: contrast with a named reference.
            design: partial design of the sweep; None for a complete grid.
        """
        self._configurations, self._contrast = list(configurations), contrast
        indices = [None if design is None else design.space.index(levels) for levels in self._configurations]
        self._design = design if design is not None and _is_partial(design, indices) else None
        self._point_indices = np.array([-1 if index is None else index for index in indices], dtype=int)
        strata = (axis for axis in STRATUM_AXES if axis != contrast.axis and axis not in contrast.within)
        self._stratum = next(
            (axis for axis in strata if len({levels.get(axis) for levels in self._configurations}) > 1), None
        )
        self.groups: list[np.ndarray] = self._pairs() if self._design is None else self._design_groups(self._design)

    def weights(self, available: np.ndarray) -> np.ndarray | None:
        """Return the weight of each configuration if only some groups are available.

        The estimate at a seed is the sum of weight times value, level minus reference.

        Args:
            available: bool [group], the available groups, in the order of `groups`.

        Returns:
            float [configuration], zero for unused ones; None if these groups do not determine the contrast, or if there
            are none.
        """
        if not available.any():
            return None
        chosen = [group for group, is_available in zip(self.groups, available, strict=True) if is_available]
        return (
            self._pair_weights(chosen)
            if self._design is None
            else self._least_squares_weights(self._design, np.concatenate(chosen))
        )

    @property
    def used_configurations(self) -> np.ndarray:
        """Bool [configuration]: True for the configurations that occur in a group.

        All others have no weight in any estimate.
        """
        used = np.zeros(len(self._configurations), dtype=bool)
        for group in self.groups:
            used[group] = True
        return used

    # --- matched pairs ------------------------------------------------------------------------------------------------

    def _pairs(self) -> list[np.ndarray]:
        """Return index arrays [configuration at the level, at the reference] that agree on all other axes.

        Only configurations at the contrast's `within` levels count; those without a partner are left out.
        """
        contrast = self._contrast
        index_by_level: dict[tuple[tuple[str, str], ...], dict[str, int]] = {}
        for index, levels in enumerate(self._configurations):
            level = levels.get(contrast.axis)
            if level in (contrast.level, contrast.reference) and all(
                levels.get(a) == word for a, word in contrast.within.items()
            ):
                rest = tuple(sorted((axis, word) for axis, word in levels.items() if axis != contrast.axis))
                index_by_level.setdefault(rest, {})[str(level)] = index
        pairs = [pair for pair in index_by_level.values() if len(pair) == 2]
        return [np.array([pair[contrast.level], pair[str(contrast.reference)]]) for pair in pairs]

    def _pair_weights(self, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """Return the weights [configuration] of the mean over strata of the mean difference of their pairs.

        `chosen` holds [level, reference] index pairs; every stratum that occurs among them has the same weight.
        """
        strata = [
            None if self._stratum is None else self._configurations[int(pair[0])].get(self._stratum) for pair in chosen
        ]
        weights = np.zeros(len(self._configurations))
        for pair, stratum in zip(chosen, strata, strict=True):
            weights[pair] += np.array([1.0, -1.0]) / (strata.count(stratum) * len(set(strata)))
        return weights

    # --- partial designs ----------------------------------------------------------------------------------------------

    def _least_squares_weights(self, design: Design, members: np.ndarray) -> np.ndarray | None:
        """Return the weights [configuration] of the least-squares estimate from these configurations.

        None if the contrast has levels outside the design or cannot be estimated. Fixed levels of axes outside the
        design are ignored.

        Args:
            design: partial design.
            members: indices of configurations that are points of the design.
        """
        contrast, space = self._contrast, design.space
        fixed_levels = {axis: word for axis, word in contrast.within.items() if axis in space.axes}
        levels = contrast.level, str(contrast.reference)
        is_in_design = contrast.axis in space.axes and {*levels} <= {*space.axes[contrast.axis]}
        if not is_in_design or any(word not in space.axes[axis] for axis, word in fixed_levels.items()):
            return None
        contrast_weights = design.model.interaction_contrast({contrast.axis: levels}, fixed_levels, self._stratum)
        rows = design.model.full_matrix[self._point_indices[members]]
        if not is_estimable(rows, contrast_weights):
            return None
        weights = np.zeros(len(self._configurations))
        weights[members] = np.linalg.pinv(rows, rcond=1e-10).T @ contrast_weights
        return weights

    def _design_groups(self, design: Design) -> list[np.ndarray]:
        """Return the configurations of the design with a nonzero weight, each as a group of its own.

        Weights up to 1e-9 (ZERO_WEIGHT) count as zero. Empty if the contrast cannot be estimated from all of them.
        """
        in_design = np.flatnonzero(self._point_indices >= 0)
        weights = self._least_squares_weights(design, in_design) if len(in_design) else None
        return (
            []
            if weights is None
            else [in_design[i : i + 1] for i in np.flatnonzero(np.abs(weights[in_design]) > ZERO_WEIGHT)]
        )


def _is_partial(design: Design, indices: Sequence[int | None]) -> bool:
    """Return True if combinations that the grid allows are missing; otherwise pairs exist as in a complete grid.

    `indices` are the point indices of the configurations; None for one outside the design.
    """
    return len({*indices} - {None}) < len(design.space.points)


def complete_subset(
    available: np.ndarray, is_estimable_from: Callable[[np.ndarray], bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups and seeds to use, so that every used group has values at every used seed.

    The group or seed with the largest share of missing values is dropped repeatedly. Among equals a seed is dropped,
    the last one first, since a further seed can replace it. A seed is also dropped if the contrast would be
    undetermined without the group.

    Args:
        available: bool [group, seed], True for groups with all values.
        is_estimable_from: returns True if a selection of groups, bool [group], determines the contrast.

    Returns:
        bool [group] and bool [seed]; all seeds are False if no complete subset exists.
    """
    groups, seeds = np.ones(available.shape[0], dtype=bool), np.ones(available.shape[1], dtype=bool)
    while groups.any() and seeds.any():
        lack_of_group = np.where(groups, 1 - available[:, seeds].mean(axis=1), -1.0)
        lack_of_seed = np.where(seeds, 1 - available[groups].mean(axis=0), -1.0)
        if max(lack_of_group.max(), lack_of_seed.max()) <= 0:
            break
        without = groups.copy()
        without[int(lack_of_group.argmax())] = False
        if lack_of_seed.max() >= lack_of_group.max() or not is_estimable_from(without):
            seeds[len(seeds) - 1 - int(lack_of_seed[::-1].argmax())] = False
        else:
            groups = without
    return groups, seeds
