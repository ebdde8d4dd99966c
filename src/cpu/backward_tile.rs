//! One tile of keys against one tile of query rows, backward.
//!
//! Masked tiles are treated as in the forward: the products leave out what is hidden by blocks, and
//! where a hidden row or key holds NaN, each row (or key) is multiplied alone.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::buffer::{TRANSPOSED_ROWS, Tile, padded};
use super::element::Element;
use super::forward_tile::all_finite;
use super::matmul::{Begin, MAX_ROWS, Product};
use super::rows::{Alibi, RowTile, Scaling, View};
use super::simd::{Real, exp2, tanh};
use crate::params::AttnParams;

/// What is known of each query row beforehand.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    /// `(batch, num_heads, seqlen_q)`.
    pub(crate) delta: &'a [T],
    /// `(2, batch, num_heads, seqlen_q)`: maximum, log2 of the sum.
    pub(crate) stats: &'a [T],
}

/// The tiles that one thread works in.
pub(crate) struct Scratch<T> {
    /// `(head_dim, keys)`.
    k_t: Tile<T>,
    v_t: Tile<T>,
    /// `(keys, head_dim)`.
    k: Tile<T>,
    pub(crate) dk: Tile<T>,
    pub(crate) dv: Tile<T>,
    /// `(rows, head_dim)`: scaled q, dout, and this step's share of dq.
    q: Tile<T>,
    dout: Tile<T>,
    pub(crate) dq: Tile<T>,
    /// `(rows, keys)`: scores, then probabilities.
    probs: Tile<T>,
    /// `(rows, keys)`: gradients of the probabilities, then of the scores.
    dscores: Tile<T>,
    alibi: Alibi<T>,
    /// Rows on their way into a transposed tile.
    staging: Tile<T>,
    /// 0, 1, 2, ... for the distances of alibi.
    key_index: Vec<T>,
}

impl<T: Real> Scratch<T> {
    pub(crate) fn new(head_dim: usize, rows: usize, keys: usize) -> Self {
        Self {
            k_t: Tile::new(head_dim, keys),
            v_t: Tile::new(head_dim, keys),
            k: Tile::new(keys, head_dim),
            dk: Tile::new(keys, head_dim),
            dv: Tile::new(keys, head_dim),
            q: Tile::new(rows, head_dim),
            dout: Tile::new(rows, head_dim),
            dq: Tile::new(rows, head_dim),
            probs: Tile::new(rows, keys),
            dscores: Tile::new(rows, keys),
            alibi: Alibi::new(rows),
            staging: Tile::new(TRANSPOSED_ROWS, head_dim),
            key_index: (0..padded::<T>(keys))
                .map(|key| T::from_f64(key as f64))
                .collect(),
        }
    }
}

/// Loads a key tile and clears its gradients.
pub(crate) struct LoadKeys<'a, E: Element> {
    pub(crate) params: &'a AttnParams,
    pub(crate) k: View<'a, E>,
    pub(crate) v: View<'a, E>,
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
    pub(crate) scratch: &'a mut Scratch<E::Acc>,
}

impl<E: Element> WithSimd for LoadKeys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self {
            params,
            k,
            v,
            batch,
            kv_head,
            keys,
            scratch,
        } = self;
        let Scratch {
            k_t,
            v_t,
            k: k_tile,
            dk,
            dv,
            staging,
            ..
        } = scratch;
        let (count, head_dim) = (keys.len(), params.head_dim);
        k.load_tile(batch, keys.clone(), kv_head, k_tile);
        k_t.load_transposed(count, head_dim, E::Acc::ONE, staging, |row, line| {
            line.copy_from_slice(k_tile.row(row, head_dim));
        });
        v_t.load_transposed(count, head_dim, E::Acc::ONE, staging, |row, line| {
            v.load(batch, keys.start + row, kv_head, line);
        });
        let cols = padded::<E::Acc>(head_dim);
        for key in 0..count {
            dk.row_mut(key, cols).fill(E::Acc::ZERO);
            dv.row_mut(key, cols).fill(E::Acc::ZERO);
        }
    }
}

/// One tile of query rows against the key tile: adds to dk and dv, and leaves its share of dq.
pub(crate) struct Step<'a, E: Element> {
    pub(crate) params: &'a AttnParams,
    pub(crate) q: View<'a, E>,
    pub(crate) dout: View<'a, E>,
    pub(crate) rows: Rows<'a, E::Acc>,
    pub(crate) tile: &'a RowTile,
    pub(crate) keys: Range<usize>,
    pub(crate) scratch: &'a mut Scratch<E::Acc>,
}

impl<E: Element> WithSimd for Step<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            params,
            q,
            dout,
            rows,
            tile,
            keys,
            scratch,
        } = self;
        let head_dim = params.head_dim;
        let scaling = Scaling::<E::Acc>::new(params);
        for row in 0..tile.rows() {
            let (position, head) = tile.row(row);
            let line = scratch.q.row_mut(row, head_dim);
            q.load(tile.batch, position, head, line);
            for x in line {
                *x = *x * scaling.q;
            }
            dout.load(
                tile.batch,
                position,
                head,
                scratch.dout.row_mut(row, head_dim),
            );
        }
        let masked = !params
            .mask
            .all_visible(tile.positions.clone(), keys.clone());
        let band = Band {
            params,
            tile,
            keys: keys.clone(),
            masked,
            block: if !masked {
                usize::MAX
            } else if all_finite(&scratch.q, tile.rows(), head_dim)
                && all_finite(&scratch.dout, tile.rows(), head_dim)
                && all_finite(&scratch.k, keys.len(), head_dim)
            {
                MAX_ROWS
            } else {
                // 0 * NaN is NaN: no row may meet a key that it doesn't see.
                1
            },
        };

        band.rows_by_keys(simd, &scratch.q, &scratch.k_t, &mut scratch.probs);
        band.rows_by_keys(simd, &scratch.dout, &scratch.v_t, &mut scratch.dscores);
        if let Some(slopes) = params.alibi_slopes_on_host() {
            scratch.alibi.set(params, slopes, tile, 0, keys.start);
        }
        for row in 0..tile.rows() {
            row_gradient::<S, E::Acc>(simd, &band, &scaling, rows, row, scratch);
        }
        band.keys_by_head_dim(simd, &scratch.probs, &scratch.dout, &mut scratch.dv);
        band.keys_by_head_dim(simd, &scratch.dscores, &scratch.q, &mut scratch.dk);
        band.rows_by_head_dim(simd, &scratch.dscores, &scratch.k, &mut scratch.dq);
    }
}

/// Turns a row of scores into probabilities and a row of dprobs into dscores; 0 where it sees no key.
#[inline(always)]
fn row_gradient<S: Simd, T: Real>(
    simd: S,
    band: &Band<'_>,
    scaling: &Scaling<T>,
    rows: Rows<'_, T>,
    row: usize,
    scratch: &mut Scratch<T>,
) {
    let params = band.params;
    let (position, head) = band.tile.row(row);
    let index = (band.tile.batch * params.num_heads + head) * params.seqlen_q + position;
    let (maxima, log_sums) = rows.stats.split_at(rows.stats.len() / 2);
    // A row without keys has sum 0; a maximum of +inf makes its probabilities 0. A NaN sum goes on, and
    // makes them NaN.
    let (max, log_sum) = if log_sums[index] == T::NEG_INFINITY {
        (T::ZERO - T::NEG_INFINITY, T::ZERO)
    } else {
        (maxima[index], log_sums[index])
    };
    let (max, log_sum) = (T::splat(simd, max), T::splat(simd, log_sum));
    let delta = T::splat(simd, rows.delta[index]);

    let visible = band.keys_of_rows(row..row + 1);
    let (start, end) = whole_lines::<T>(&visible);
    let cols = padded::<T>(band.keys.len());
    let Scratch {
        probs,
        dscores,
        alibi,
        key_index,
        ..
    } = scratch;
    let (probs, dscores) = (probs.row_mut(row, cols), dscores.row_mut(row, cols));
    {
        let (probs, _) = T::as_vectors_mut::<S>(&mut probs[start..end]);
        let (dscores, _) = T::as_vectors_mut::<S>(&mut dscores[start..end]);
        let (key_index, _) = T::as_vectors::<S>(&key_index[start..end]);
        let one = T::splat(simd, T::ONE);
        for ((prob, dscore), &key) in probs.iter_mut().zip(dscores).zip(key_index) {
            let mut score = *prob;
            // The derivative of softcap.
            let mut slope = one;
            if let Some(factor) = scaling.softcap {
                let capped = tanh::<S, T>(simd, score);
                score = T::vmul(simd, T::splat(simd, factor), capped);
                slope = T::vsub(simd, one, T::vmul(simd, capped, capped));
            }
            if params.alibi_slopes.is_some() {
                let aligned = T::splat(simd, alibi.aligned_key[row]);
                let distance = T::abs(simd, T::vsub(simd, aligned, key));
                let neg_slope = T::splat(simd, alibi.neg_slope[row]);
                score = T::mul_add(simd, neg_slope, distance, score);
            }
            let shifted = T::vsub(simd, T::vsub(simd, score, max), log_sum);
            *prob = exp2::<S, T>(simd, shifted);
            let dprob = T::vsub(simd, *dscore, delta);
            *dscore = T::vmul(simd, T::vmul(simd, *prob, dprob), slope);
        }
    }
    if band.masked {
        for line in [probs, dscores] {
            line[..visible.start].fill(T::ZERO);
            line[visible.end..].fill(T::ZERO);
        }
    }
}

/// The part of a (rows x keys) tile in which something is visible, and the products over it.
struct Band<'a> {
    params: &'a AttnParams,
    tile: &'a RowTile,
    keys: Range<usize>,
    masked: bool,
    /// Rows (or keys) that a product takes together.
    block: usize,
}

impl Band<'_> {
    /// The keys, relative to the tile, that one of the rows sees.
    fn keys_of_rows(&self, rows: Range<usize>) -> Range<usize> {
        let visible = self
            .params
            .mask
            .keys_of_rows(self.tile.positions_of_rows(rows));
        let clamp = |key: usize| key.clamp(self.keys.start, self.keys.end) - self.keys.start;
        clamp(visible.start)..clamp(visible.end).max(clamp(visible.start))
    }

    /// The rows that see one of the keys, which are relative to the tile.
    fn rows_of_keys(&self, keys: Range<usize>) -> Range<usize> {
        let keys = self.keys.start + keys.start..self.keys.start + keys.end;
        self.tile
            .rows_of_positions(self.params.mask.rows_of_keys(keys))
    }

    /// `out = lhs · rhs_t`: `(rows, head_dim) · (head_dim, keys)`.
    #[inline(always)]
    fn rows_by_keys<S: Simd, T: Real>(
        &self,
        simd: S,
        lhs: &Tile<T>,
        rhs_t: &Tile<T>,
        out: &mut Tile<T>,
    ) {
        for_blocks(self.tile.rows(), self.block, |block| {
            let (start, end) = whole_lines::<T>(&self.keys_of_rows(block.clone()));
            simd.vectorize(Product {
                rows: block.len(),
                cols: end - start,
                inner: 0..self.params.head_dim,
                lhs: lhs.lhs(block.start, 0),
                rhs: rhs_t.rhs(0, start),
                out: out.out(block.start, start),
                begin: Begin::Zero,
            });
        });
    }

    /// `out += lhsᵀ · rhs`: `(keys, rows) · (rows, head_dim)`.
    #[inline(always)]
    fn keys_by_head_dim<S: Simd, T: Real>(
        &self,
        simd: S,
        lhs: &Tile<T>,
        rhs: &Tile<T>,
        out: &mut Tile<T>,
    ) {
        for_blocks(self.keys.len(), self.block, |block| {
            simd.vectorize(Product {
                rows: block.len(),
                cols: padded::<T>(self.params.head_dim),
                inner: self.rows_of_keys(block.clone()),
                lhs: lhs.lhs_transposed(block.start),
                rhs: rhs.rhs(0, 0),
                out: out.out(block.start, 0),
                begin: Begin::Add,
            });
        });
    }

    /// `out = lhs · rhs`: `(rows, keys) · (keys, head_dim)`.
    #[inline(always)]
    fn rows_by_head_dim<S: Simd, T: Real>(
        &self,
        simd: S,
        lhs: &Tile<T>,
        rhs: &Tile<T>,
        out: &mut Tile<T>,
    ) {
        for_blocks(self.tile.rows(), self.block, |block| {
            simd.vectorize(Product {
                rows: block.len(),
                cols: padded::<T>(self.params.head_dim),
                inner: self.keys_of_rows(block.clone()),
                lhs: lhs.lhs(block.start, 0),
                rhs: rhs.rhs(0, 0),
                out: out.out(block.start, 0),
                begin: Begin::Zero,
            });
        });
    }
}

/// Calls `f` with `0..len` cut into blocks.
#[inline(always)]
fn for_blocks(len: usize, block: usize, mut f: impl FnMut(Range<usize>)) {
    let block = block.min(len);
    for first in (0..len).step_by(block) {
        f(first..(first + block).min(len));
    }
}

/// The start and end of the cache lines that hold `cols`; equal if it is empty.
fn whole_lines<T: Real>(cols: &Range<usize>) -> (usize, usize) {
    if cols.is_empty() {
        return (0, 0);
    }
    let line = padded::<T>(1);
    (cols.start / line * line, padded::<T>(cols.end))
}
