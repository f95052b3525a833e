"""The order of samples: a permutation of range(n) that is computed, not stored.

A balanced Feistel network over the smallest even number of bits that holds n, walked until the
value falls inside range(n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
Any sample of any epoch costs O(1) time and memory, so resuming needs one integer, and the order
depends on integer arithmetic alone: no random-number library can change it.

Letters: N samples asked for.
"""

import hashlib

import numpy as np

ROUNDS = 12  # three are pseudorandom on large domains (Luby-Rackoff); small ones need more
_MASK64 = (1 << 64) - 1


def shuffled(index_N: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """int64 (N,): where each index of range(``length``) goes in this seed's and epoch's order."""
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(_mix(seed) + epoch) + number) for number in range(ROUNDS)]
    value_N = _feistel(index_N.astype(np.uint64), half, keys)
    while True:
        outside = value_N >= length  # the domain is at most 4 * length: a few walks
        if not outside.any():
            return value_N.astype(np.int64)
        value_N[outside] = _feistel(value_N[outside], half, keys)


def order_sha256(length: int, seed: int) -> str:
    """The first epoch's whole order as one digest (little-endian int64): the proof of determinism.

    The same on every machine and for every number of ranks.
    """
    order_N = shuffled(np.arange(length), length, seed, epoch=0)
    return hashlib.sha256(order_N.astype("<i8").tobytes()).hexdigest()


def _feistel(value_N: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = value_N >> np.uint64(half), value_N & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right + np.uint64(key)) & mask)
    return left << np.uint64(half) | right


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014), on one integer modulo 2**64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def _mix_array(value_N: np.ndarray) -> np.ndarray:
    """``_mix`` on uint64 arrays, whose arithmetic wraps by itself."""
    value_N = value_N + np.uint64(0x9E3779B97F4A7C15)
    value_N = (value_N ^ value_N >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value_N = (value_N ^ value_N >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value_N ^ value_N >> np.uint64(31)
