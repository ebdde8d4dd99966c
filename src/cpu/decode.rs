//! The forward pass for a handful of query rows: decoding on a long cache, bound by reading K and V.
//!
//! With so few rows a tile's vectors would be mostly empty, so here scores are rows by keys: each is a
//! dot product along head_dim, and every row of K and V is read once for all the heads of its group.

use std::ops::Range;

use pulp::Simd;

use super::buffer::{Tile, padded};
use super::element::Element;
use super::forward::{Attend, Scratch, rescale_rows, softcap};
use super::matmul::{Begin, Lhs, Out, Rhs, product};
use super::rows::{RowTile, Scaling};
use super::simd::Real;
use crate::params::AttnParams;

/// Rows up to which this kernel is used: above, a tile fills half a vector of 16.
pub(crate) const MAX_ROWS: usize = 8;

#[inline(always)]
pub(crate) fn attend<S: Simd, E: Element>(simd: S, attend: Attend<'_, E>) {
    let Attend {
        params,
        q,
        k,
        v,
        tiles,
        keys,
        max_keys,
        scratch,
        ..
    } = attend;
    let head_dim = params.head_dim;
    let scaling = Scaling::<E::Acc>::new(params);
    let lines = tiles
        .iter()
        .flat_map(|tile| (0..tile.rows()).map(move |row| (tile, row)));
    for (line, (tile, row)) in lines.enumerate() {
        let (position, head) = tile.row(row);
        let line = scratch.q.row_mut(line, head_dim);
        q.load(tile.batch, position, head, line);
        for x in line {
            *x = *x * scaling.q;
        }
    }

    let mut first_key = keys.start;
    while first_key < keys.end {
        let tile_keys = first_key..(first_key + max_keys).min(keys.end);
        let next_keys = tile_keys.end..(tile_keys.end + max_keys).min(keys.end);
        let mut first_line = 0;
        for (index, tile) in tiles.iter().enumerate() {
            // What will be read after this tile's V.
            let (next_tile, next_keys) = match tiles.get(index + 1) {
                Some(next) => (next, tile_keys.clone()),
                None => (&tiles[0], next_keys.clone()),
            };
            let step = Step {
                params,
                tile,
                keys: tile_keys.clone(),
                first_line,
            };
            for block in step.blocks() {
                let rows = block.start + tile_keys.start..block.end + tile_keys.start;
                v.prefetch(tile.batch, rows.clone(), tile.kv_head);
                k.load_tile(tile.batch, rows, tile.kv_head, block.start, &mut scratch.k);
                step.multiply_scores::<S, E::Acc>(simd, block, scratch);
            }
            if let Some(slopes) = &params.alibi_slopes {
                scratch.alibi.set(params, slopes, tile, tile_keys.start);
            }
            for row in 0..tile.rows() {
                step.softmax_row::<S, E::Acc>(simd, &scaling, row, scratch);
            }
            let lines = first_line..first_line + tile.rows();
            rescale_rows(
                &scratch.softmax.rescale,
                lines.clone(),
                padded::<E::Acc>(head_dim),
                &mut scratch.out,
            );
            for block in step.blocks() {
                let rows = block.start + tile_keys.start..block.end + tile_keys.start;
                let next = next_keys.start + block.start..next_keys.start + block.end;
                k.prefetch(
                    next_tile.batch,
                    next.start..next.end.min(next_keys.end),
                    next_tile.kv_head,
                );
                v.load_tile(tile.batch, rows, tile.kv_head, block.start, &mut scratch.v);
                step.multiply_values::<S, E::Acc>(simd, block, scratch);
            }
            first_line = lines.end;
        }
        first_key = tile_keys.end;
    }
}

/// Keys that are loaded, and multiplied, between two rounds of prefetches: few, so that memory never
/// stands still while the cores multiply.
const BLOCK: usize = 32;

/// The rows of one key/value head against one tile of keys.
struct Step<'a> {
    params: &'a AttnParams,
    tile: &'a RowTile,
    keys: Range<usize>,
    /// Where the rows of `tile` begin in the scratch's q, out and softmax.
    first_line: usize,
}

impl Step<'_> {
    /// The tile's keys, relative to its first, in blocks.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = self.keys.len();
        (0..len)
            .step_by(BLOCK)
            .map(move |first| first..(first + BLOCK).min(len))
    }

    /// The keys, relative to the tile's first, that a row sees.
    fn visible_keys(&self, row: usize) -> Range<usize> {
        let visible = self.params.mask.keys_of_row(self.tile.row(row).0);
        let clamp = |key: usize| key.clamp(self.keys.start, self.keys.end) - self.keys.start;
        clamp(visible.start)..clamp(visible.end).max(clamp(visible.start))
    }

    /// `scores[row][key] = q[row] · k[key]` for the keys of a block.
    #[inline(always)]
    fn multiply_scores<S: Simd, T: Real>(
        &self,
        simd: S,
        block: Range<usize>,
        scratch: &mut Scratch<T>,
    ) {
        let cols = padded::<T>(self.params.head_dim);
        let rows = self.tile.rows();
        let mut row = 0;
        while row < rows {
            let line = self.first_line + row;
            row += match rows - row {
                1 => dot_block::<S, T, 1>(simd, cols, line, row, block.clone(), scratch),
                2 => dot_block::<S, T, 2>(simd, cols, line, row, block.clone(), scratch),
                3 => dot_block::<S, T, 3>(simd, cols, line, row, block.clone(), scratch),
                _ => dot_block::<S, T, 4>(simd, cols, line, row, block.clone(), scratch),
            };
        }
    }

    /// Softcap, alibi and mask of one row of scores, and its step of the softmax.
    #[inline(always)]
    fn softmax_row<S: Simd, T: Real>(
        &self,
        simd: S,
        scaling: &Scaling<T>,
        row: usize,
        scratch: &mut Scratch<T>,
    ) {
        let keys = self.keys.len();
        let scores = scratch.scores.row_mut(row, padded::<T>(keys));
        if let Some(factor) = scaling.softcap {
            softcap::<S, T>(simd, factor, scores);
        }
        if self.params.alibi_slopes.is_some() {
            let (slope, aligned) = (scratch.alibi.neg_slope[row], scratch.alibi.aligned_key[row]);
            for (key, score) in scores[..keys].iter_mut().enumerate() {
                let distance = (aligned.to_f64() - key as f64).abs();
                *score = T::from_f64(score.to_f64() + slope.to_f64() * distance);
            }
        }
        let visible = self.visible_keys(row);
        scores[..visible.start].fill(T::NEG_INFINITY);
        scores[visible.end..].fill(T::NEG_INFINITY);
        scratch
            .softmax
            .update_row(simd, self.first_line + row, scores);
    }

    /// `out += probs · v` for the keys of a block; where the mask cuts the tile, each row over exactly
    /// the keys that it sees.
    #[inline(always)]
    fn multiply_values<S: Simd, T: Real>(
        &self,
        simd: S,
        block: Range<usize>,
        scratch: &mut Scratch<T>,
    ) {
        let rows = self.tile.rows();
        let all_visible = self
            .params
            .mask
            .all_visible(self.tile.positions.clone(), self.keys.clone());
        let (scores_stride, v_stride, out_stride) = (
            scratch.scores.stride(),
            scratch.v.stride(),
            scratch.out.stride(),
        );
        let count = if all_visible { rows } else { 1 };
        for first in (0..rows).step_by(count) {
            let visible = self.visible_keys(first);
            let start = visible.start.clamp(block.start, block.end);
            let end = visible.end.clamp(start, block.end);
            product(
                simd,
                count.min(rows - first),
                padded::<T>(self.params.head_dim),
                start..end,
                Lhs {
                    data: &scratch.scores.data()[first * scores_stride..],
                    row_stride: scores_stride,
                    col_stride: 1,
                },
                Rhs {
                    data: scratch.v.data(),
                    row_stride: v_stride,
                },
                Out {
                    data: &mut scratch.out.data_mut()[(self.first_line + first) * out_stride..],
                    row_stride: out_stride,
                },
                Begin::Add,
            );
        }
    }
}

/// The scores of `ROWS` rows, from `line` of q and `row` of the scores on, and the keys of a block;
/// returns `ROWS`.
///
/// Four keys at a time with 32 registers, two with 16: each vector of q serves them all.
#[inline(always)]
fn dot_block<S: Simd, T: Real, const ROWS: usize>(
    simd: S,
    cols: usize,
    line: usize,
    row: usize,
    block: Range<usize>,
    scratch: &mut Scratch<T>,
) -> usize {
    let Scratch { q, k, scores, .. } = scratch;
    let mut key = block.start;
    while key < block.end {
        key += if S::REGISTER_COUNT >= 32 && key + 4 <= block.end {
            dot_products::<S, T, ROWS, 4>(simd, cols, (q, line), (k, key), (scores, row))
        } else if key + 2 <= block.end {
            dot_products::<S, T, ROWS, 2>(simd, cols, (q, line), (k, key), (scores, row))
        } else {
            dot_products::<S, T, ROWS, 1>(simd, cols, (q, line), (k, key), (scores, row))
        };
    }
    ROWS
}

/// `scores[row + i][key + j] = q[line + i] · k[key + j]`; returns `KEYS`.
#[inline(always)]
fn dot_products<S: Simd, T: Real, const ROWS: usize, const KEYS: usize>(
    simd: S,
    cols: usize,
    (q, line): (&Tile<T>, usize),
    (k, key): (&Tile<T>, usize),
    (scores, row): (&mut Tile<T>, usize),
) -> usize {
    let q_rows: [&[T::Vector<S>]; ROWS] =
        std::array::from_fn(|i| T::as_vectors::<S>(q.row(line + i, cols)).0);
    let k_rows: [&[T::Vector<S>]; KEYS] =
        std::array::from_fn(|j| T::as_vectors::<S>(k.row(key + j, cols)).0);
    let mut sums = [[T::splat(simd, T::ZERO); KEYS]; ROWS];
    for d in 0..q_rows[0].len() {
        for (sums, q) in sums.iter_mut().zip(q_rows) {
            for (sum, k) in sums.iter_mut().zip(k_rows) {
                *sum = T::mul_add(simd, q[d], k[d], *sum);
            }
        }
    }
    let stride = scores.stride();
    for (i, sums) in sums.iter().enumerate() {
        let scores = &mut scores.data_mut()[(row + i) * stride + key..][..KEYS];
        for (score, &sum) in scores.iter_mut().zip(sums) {
            *score = T::reduce_sum(simd, sum);
        }
    }
    KEYS
}
