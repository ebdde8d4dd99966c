//! The forward pass for a handful of query rows: decoding on a long cache, bound by reading K and V.
//!
//! With so few rows a tile's vectors would be mostly empty, so here scores are rows by keys: each is a
//! dot product along head_dim, and every row of K and V is read once for all the heads of its group.

use std::ops::Range;

use pulp::Simd;

use super::buffer::{Tile, padded};
use super::element::Element;
use super::forward_tile::{Attend, Scratch, rescale_rows, softcap};
use super::matmul::{Begin, Out, Product, Rhs};
use super::rows::{RowTile, Scaling, View};
use super::simd::Real;
use crate::params::AttnParams;

/// Keys in a block: few, since its rows of K or V stay in L1 while all rows of q meet them.
const BLOCK: usize = 16;

/// Keys in a tile: K of all heads, and V with it, are fetched into L2 while the other is multiplied.
pub(crate) const fn tile_keys<T>(num_kv_heads: usize, head_dim: usize) -> usize {
    const TILE_BYTES: usize = 64 << 10;
    let keys = TILE_BYTES / (num_kv_heads * head_dim * size_of::<T>()) / BLOCK * BLOCK;
    match keys {
        0..BLOCK => BLOCK,
        BLOCK..=96 => keys,
        _ => 96,
    }
}

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
        keys: all_keys,
        tile_n,
        scratch,
        ..
    } = attend;
    let head_dim = params.head_dim;
    let scaling = Scaling::<E::Acc>::new(params);
    let mut lines = 0;
    for (tile, row) in tiles
        .iter()
        .flat_map(|tile| (0..tile.rows()).map(move |row| (tile, row)))
    {
        let (position, head) = tile.row(row);
        let line = scratch.q.row_mut(lines, head_dim);
        lines += 1;
        q.load(tile.batch, position, head, line);
        for x in line {
            *x = *x * scaling.q;
        }
    }

    let mut first_key = all_keys.start;
    while first_key < all_keys.end {
        let keys = first_key..(first_key + tile_n).min(all_keys.end);
        let steps = || {
            let mut first_line = 0;
            let keys = keys.clone();
            tiles.iter().map(move |tile| {
                let step = Step {
                    params,
                    tile,
                    keys: keys.clone(),
                    first_line,
                };
                first_line += tile.rows();
                step
            })
        };
        let mut upcoming = Upcoming::new(v, tiles, keys.clone());
        for block in blocks(keys.len()) {
            for step in steps() {
                upcoming.prefetch(block.len());
                let k_rows = step.read_rows(k, &block, &mut scratch.k);
                step.multiply_scores::<S, E::Acc>(
                    simd,
                    &block,
                    &scratch.q,
                    k_rows,
                    &mut scratch.scores,
                );
            }
        }
        for step in steps() {
            if let Some(slopes) = params.alibi_slopes_on_host() {
                scratch.alibi.set(params, slopes, step.tile, keys.start);
            }
            for row in 0..step.tile.rows() {
                step.softmax_row::<S, E::Acc>(simd, &scaling, row, scratch);
            }
        }
        rescale_rows(
            &scratch.softmax.rescale,
            0..lines,
            padded::<E::Acc>(head_dim),
            &mut scratch.out,
        );
        let mut upcoming = Upcoming::new(k, tiles, keys.end..(keys.end + tile_n).min(all_keys.end));
        for block in blocks(keys.len()) {
            for step in steps() {
                upcoming.prefetch(block.len());
                let v_rows = step.read_rows(v, &block, &mut scratch.v);
                step.multiply_values::<S, E::Acc>(
                    simd,
                    &block,
                    &scratch.scores,
                    v_rows,
                    &mut scratch.out,
                );
            }
        }
        first_key = keys.end;
    }
}

/// The keys of a tile, relative to its first, in blocks that are multiplied with all heads in turn.
fn blocks(keys: usize) -> impl Iterator<Item = Range<usize>> {
    (0..keys)
        .step_by(BLOCK)
        .map(move |first| first..(first + BLOCK).min(keys))
}

/// The rows of K or V that the next phase will read, in the order in which they lie in memory.
///
/// They are asked for while this phase multiplies. In the order of the multiplications, head by head,
/// a row of a head would be followed by one at another page, which no hardware prefetcher follows.
///
/// Measured on two Zen 5 cores, 32/8 heads, head_dim 128, 8192 keys in f32, where a linear pass over the
/// same memory reads 48 GB/s: without prefetches 18 GB/s, with them 30. The misses that a core's L1 can
/// have open, some 24 of 64 bytes at 100 ns, are 15 GB/s a core. A loop over keys with all heads inside
/// leaves it to the hardware's prefetchers instead and reached 24, since one key at a time costs
/// arithmetic; a pass that first converts a tile of all heads in the order of memory 15; `T1` prefetches
/// 27, plain loads in their place 17; prefetches spread over groups of four keys the same 30.
struct Upcoming<'a, E> {
    view: View<'a, E>,
    tiles: &'a [RowTile],
    keys: Range<usize>,
    next: usize,
}

impl<'a, E: Element> Upcoming<'a, E> {
    fn new(view: View<'a, E>, tiles: &'a [RowTile], keys: Range<usize>) -> Self {
        Self {
            view,
            tiles,
            keys,
            next: 0,
        }
    }

    /// Asks for the next `count` rows.
    #[inline(always)]
    fn prefetch(&mut self, count: usize) {
        let (heads, keys) = (self.tiles.len(), self.keys.len());
        let end = (self.next + count).min(heads * keys);
        for index in self.next..end {
            let (key, head) = if self.view.heads_are_adjacent() {
                (index / heads, index % heads)
            } else {
                (index % keys, index / keys)
            };
            let RowTile { batch, kv_head, .. } = self.tiles[head];
            self.view.prefetch(batch, self.keys.start + key, kv_head);
        }
        self.next = end;
    }
}

/// The rows of one key/value head against one tile of keys.
struct Step<'a> {
    params: &'a AttnParams,
    tile: &'a RowTile,
    keys: Range<usize>,
    /// Where the rows of `tile` begin in the scratch's q, scores, out and softmax.
    first_line: usize,
}

impl Step<'_> {
    /// A block of rows of K or V: in place where they can be, else converted into `tile`.
    #[inline(always)]
    fn read_rows<'a, E: Element>(
        &self,
        view: View<'a, E>,
        block: &Range<usize>,
        tile: &'a mut Tile<E::Acc>,
    ) -> Rhs<'a, E::Acc> {
        let positions = self.keys.start + block.start..self.keys.start + block.end;
        let RowTile { batch, kv_head, .. } = *self.tile;
        if let Some(rows) = view.in_place(batch, positions.start, kv_head) {
            return rows;
        }
        view.load_tile(batch, positions, kv_head, tile);
        tile.rhs(0, 0)
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
        block: &Range<usize>,
        q: &Tile<T>,
        k_rows: Rhs<'_, T>,
        scores: &mut Tile<T>,
    ) {
        let rows = self.tile.rows();
        let mut row = 0;
        while row < rows {
            let dot = Dot {
                cols: padded::<T>(self.params.head_dim),
                q: q.rhs(self.first_line + row, 0),
                k: k_rows,
                keys: block.len(),
            };
            let scores = scores.out(self.first_line + row, block.start);
            row += match rows - row {
                1 => dot.run::<S, 1>(simd, scores),
                2 => dot.run::<S, 2>(simd, scores),
                3 => dot.run::<S, 3>(simd, scores),
                _ => dot.run::<S, 4>(simd, scores),
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
        let line = self.first_line + row;
        let scores = scratch.scores.row_mut(line, padded::<T>(keys));
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
        scratch.softmax.update_row(simd, line, scores);
    }

    /// `out += probs · v` for the keys of a block; where the mask cuts the tile, each row over exactly
    /// the keys that it sees.
    #[inline(always)]
    fn multiply_values<S: Simd, T: Real>(
        &self,
        simd: S,
        block: &Range<usize>,
        scores: &Tile<T>,
        v_rows: Rhs<'_, T>,
        out: &mut Tile<T>,
    ) {
        let rows = self.tile.rows();
        let all_visible = self
            .params
            .mask
            .all_visible(self.tile.positions.clone(), self.keys.clone());
        let count = if all_visible { rows } else { 1 };
        for first in (0..rows).step_by(count) {
            let visible = self.visible_keys(first);
            let clamp = |key: usize| key.clamp(block.start, block.end) - block.start;
            simd.vectorize(Product {
                rows: count.min(rows - first),
                cols: padded::<T>(self.params.head_dim),
                inner: clamp(visible.start)..clamp(visible.end),
                lhs: scores.lhs(self.first_line + first, block.start),
                rhs: v_rows,
                out: out.out(self.first_line + first, 0),
                begin: Begin::Add,
            });
        }
    }
}

/// Dot products of a few rows of q with the rows of a block of keys.
#[derive(Clone, Copy)]
struct Dot<'a, T> {
    /// Numbers in a row, whole vectors.
    cols: usize,
    q: Rhs<'a, T>,
    k: Rhs<'a, T>,
    keys: usize,
}

impl<T: Real> Dot<'_, T> {
    /// `scores[i][j] = q[i] · k[j]` for `i < ROWS`; returns `ROWS`.
    ///
    /// Four keys at a time with 32 registers, two with 16: each vector of q serves them all.
    #[inline(always)]
    fn run<S: Simd, const ROWS: usize>(self, simd: S, mut scores: Out<'_, T>) -> usize {
        let mut key = 0;
        while key < self.keys {
            let rest = self.keys - key;
            key += if S::REGISTER_COUNT >= 32 && rest >= 4 {
                self.block::<S, ROWS, 4>(simd, key, &mut scores)
            } else if rest >= 2 {
                self.block::<S, ROWS, 2>(simd, key, &mut scores)
            } else {
                self.block::<S, ROWS, 1>(simd, key, &mut scores)
            };
        }
        ROWS
    }

    /// `KEYS` columns of the scores, from `key` on; returns `KEYS`.
    #[inline(always)]
    fn block<S: Simd, const ROWS: usize, const KEYS: usize>(
        self,
        simd: S,
        key: usize,
        scores: &mut Out<'_, T>,
    ) -> usize {
        let Self { q, k, cols, .. } = self;
        let q: [&[T::Vector<S>]; ROWS] =
            std::array::from_fn(|i| T::as_vectors::<S>(&q.data[i * q.row_stride..][..cols]).0);
        let k: [&[T::Vector<S>]; KEYS] = std::array::from_fn(|j| {
            T::as_vectors::<S>(&k.data[(key + j) * k.row_stride..][..cols]).0
        });
        let mut sums = [[T::splat(simd, T::ZERO); KEYS]; ROWS];
        for d in 0..q[0].len() {
            for (sums, q) in sums.iter_mut().zip(q) {
                for (sum, k) in sums.iter_mut().zip(k) {
                    *sum = T::mul_add(simd, q[d], k[d], *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let scores = &mut scores.data[i * scores.row_stride + key..][..KEYS];
            for (score, &sum) in scores.iter_mut().zip(sums) {
                *score = T::reduce_sum(simd, sum);
            }
        }
        KEYS
    }
}
