//! The running (max, sum) recurrence of the softmax, in base 2.
//!
//! FlashAttention-2, Algorithm 1, lines 8 to 10: when a tile of scores arrives, a row's maximum may
//! grow; its sum and its unnormalised output are then scaled by `2^(old - new)`. The division by the
//! sum comes once, at the end.

use pulp::Simd;

use super::buffer::{Tile, padded};
use super::simd::{Real, exp2, lanes};

/// Vectors of rows that are worked on together, so that their chains of operations overlap.
const VECTORS: usize = 4;

/// The state of every row of a tile.
pub(crate) struct OnlineSoftmax<T> {
    /// Largest score so far, -inf at first.
    pub(crate) max: Vec<T>,
    /// Sum of `2^(score - max)` so far.
    pub(crate) sum: Vec<T>,
    /// What the last update multiplies the output of a row by.
    pub(crate) rescale: Vec<T>,
}

impl<T: Real> OnlineSoftmax<T> {
    pub(crate) fn new(tile_m: usize) -> Self {
        let len = padded::<T>(tile_m);
        Self {
            max: vec![T::NEG_INFINITY; len],
            sum: vec![T::ZERO; len],
            rescale: vec![T::ONE; len],
        }
    }

    pub(crate) fn reset(&mut self) {
        self.max.fill(T::NEG_INFINITY);
        self.sum.fill(T::ZERO);
    }

    /// Takes in `scores`, one key a line and one query row a column, and turns them into
    /// `2^(score - max)`.
    #[inline(always)]
    pub(crate) fn update<S: Simd>(
        &mut self,
        simd: S,
        scores: &mut Tile<T>,
        keys: usize,
        rows: usize,
    ) {
        let lanes = lanes::<S, T>();
        let mut col = 0;
        while col < rows {
            if col + VECTORS * lanes <= padded::<T>(rows) {
                self.update_columns::<S, VECTORS>(simd, scores, keys, col);
                col += VECTORS * lanes;
            } else {
                self.update_columns::<S, 1>(simd, scores, keys, col);
                col += lanes;
            }
        }
    }

    #[inline(always)]
    fn update_columns<S: Simd, const NV: usize>(
        &mut self,
        simd: S,
        scores: &mut Tile<T>,
        keys: usize,
        col: usize,
    ) {
        let width = NV * lanes::<S, T>();
        let old_max = load::<S, T, NV>(&self.max[col..][..width]);
        let mut max = old_max;
        for key in 0..keys {
            let line = load::<S, T, NV>(&scores.row(key, col + width)[col..]);
            for (max, score) in max.iter_mut().zip(line) {
                *max = T::max(simd, *max, score);
            }
        }
        let max_used = max.map(|max| finite_max::<S, T>(simd, max));
        let mut sum = [T::splat(simd, T::ZERO); NV];
        for key in 0..keys {
            let line = &mut scores.row_mut(key, col + width)[col..];
            let (vectors, _) = T::as_vectors_mut::<S>(line);
            for ((vector, sum), &max) in vectors.iter_mut().zip(&mut sum).zip(&max_used) {
                *vector = exp2::<S, T>(simd, T::vsub(simd, *vector, max));
                *sum = T::vadd(simd, *sum, *vector);
            }
        }
        let (rescale, _) = T::as_vectors_mut::<S>(&mut self.rescale[col..][..width]);
        let (sums, _) = T::as_vectors_mut::<S>(&mut self.sum[col..][..width]);
        let (maxima, _) = T::as_vectors_mut::<S>(&mut self.max[col..][..width]);
        for j in 0..NV {
            rescale[j] = exp2::<S, T>(simd, T::vsub(simd, old_max[j], max_used[j]));
            sums[j] = T::mul_add(simd, sums[j], rescale[j], sum[j]);
            maxima[j] = max[j];
        }
    }
}

/// 0 in place of -inf: a row that has seen no key yet subtracts 0, not -inf from -inf.
#[inline(always)]
fn finite_max<S: Simd, T: Real>(simd: S, max: T::Vector<S>) -> T::Vector<S> {
    let lowest = T::splat(simd, T::LOWEST);
    T::select_lt(simd, max, lowest, T::splat(simd, T::ZERO), max)
}

#[inline(always)]
fn load<S: Simd, T: Real, const NV: usize>(line: &[T]) -> [T::Vector<S>; NV] {
    let (vectors, _) = T::as_vectors::<S>(line);
    std::array::from_fn(|j| vectors[j])
}
