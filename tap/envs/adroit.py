"""Adroit's tasks with D4RL's rewards.

Release 1.4.2 of gymnasium-robotics rewards the distance between palm and object in door, hammer and relocate where D4RL
penalises it, and does not end a pen episode when the pen is dropped, as D4RL does.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class D4RLReward(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Replaces reward and termination of an AdroitHand environment by those of `rule`, a function of the simulated hand."""

    def __init__(self, env: gymnasium.Env[np.ndarray, np.ndarray], rule: Callable[[Any], tuple[float, bool]]) -> None:
        super().__init__(env)
        self.rule = rule

    def step(self, action: np.ndarray) -> Step:
        """Take one step with the reward of the rule."""
        observation, _, _, truncated, info = self.env.step(action)
        reward, terminated = self.rule(self.env.unwrapped)
        return observation, reward, terminated, truncated, info


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


def _pen(hand: Any) -> tuple[float, bool]:
    """Turn a pen to a target orientation; dropping it ends the episode."""
    sites, pen = hand.data.site_xpos, hand.data.xpos[hand.obj_body_id]
    distance = _distance(pen, sites[hand.eps_ball_site_id])
    axis = (sites[hand.obj_t_site_id] - sites[hand.obj_b_site_id]) / hand.pen_length
    target_axis = (sites[hand.tar_t_site_id] - sites[hand.tar_b_site_id]) / hand.tar_length
    similarity = float(axis @ target_axis)
    dropped = bool(pen[2] < 0.075)
    bonus = 10 * (distance < 0.075 and similarity > 0.9) + 50 * (distance < 0.075 and similarity > 0.95)
    return similarity - distance + bonus - 5 * dropped, dropped


def _door(hand: Any) -> tuple[float, bool]:
    """Open a latch and swing the door open."""
    sites, angle = hand.data.site_xpos, float(hand.data.qpos[hand.door_hinge_addrs])
    reach = _distance(sites[hand.grasp_site_id], sites[hand.handle_site_id])
    cost = 0.1 * reach + 0.1 * (angle - 1.57) ** 2 + 1e-5 * float(np.sum(hand.data.qvel**2))
    return 2 * (angle > 0.2) + 8 * (angle > 1.0) + 10 * (angle > 1.35) - cost, False


def _hammer(hand: Any) -> tuple[float, bool]:
    """Drive a nail into a board with a hammer."""
    sites, hammer = hand.data.site_xpos, hand.data.xpos[hand.obj_body_id]
    head, nail = sites[hand.tool_site_id], sites[hand.target_obj_site_id]
    reach, swing = _distance(sites[hand.S_grasp_site_id], hammer), _distance(head, nail)
    to_goal = _distance(nail, sites[hand.goal_site_id])
    cost = 0.1 * reach + swing + 10 * to_goal + 1e-2 * float(np.linalg.norm(hand.data.qvel))
    return 2 * bool(hammer[2] > 0.04 and head[2] > 0.04) + 25 * (to_goal < 0.02) + 75 * (to_goal < 0.01) - cost, False


def _relocate(hand: Any) -> tuple[float, bool]:
    """Carry a ball to a target in the air."""
    ball, palm = hand.data.xpos[hand.obj_body_id], hand.data.site_xpos[hand.S_grasp_site_id]
    target = hand.data.site_xpos[hand.target_obj_site_id]
    to_target = _distance(ball, target)
    lifted = 1.0 - 0.5 * _distance(palm, target) - 0.5 * to_target if ball[2] > 0.04 else 0.0
    return lifted + 10 * (to_target < 0.1) + 20 * (to_target < 0.05) - 0.1 * _distance(palm, ball), False


D4RL_RULES = {
    "AdroitHandPen-v1": _pen,
    "AdroitHandDoor-v1": _door,
    "AdroitHandHammer-v1": _hammer,
    "AdroitHandRelocate-v1": _relocate,
}
