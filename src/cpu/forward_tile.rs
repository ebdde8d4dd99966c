//! One tile of query rows against the keys that it sees.
//!
//! The scores are computed transposed, keys by rows, which keeps every transposition out of the loop:
//!
//! ```text
//! q_t    = transpose(scale * q)                         once, head_dim x rows
//! for each tile of keys that some row sees:
//!     scores  = k · q_t                                 keys x rows, k read a number at a time
//!     softcap, alibi, mask
//!     scores  = 2^(scores - max), rescale out           down the columns, no sum across lanes
//!     out    += scoresᵀ · v                             rows x head_dim
//! out / sum
//! ```
//!
//! Only tiles that the mask's edge cuts are masked, and there the products leave out what is hidden, by
//! blocks. A hidden V row that holds NaN would still meet a probability of 0 in such a block; where
//! the tile has one, every row is multiplied alone, over exactly its own keys.
//!
//! Cost at head_dim 128, rows 192, keys 96, AVX-512: the two products take 2 * 192 * 96 * 128 / 32 =
//! 147,000 cycles, the exponentials about 7,000, loading and widening K and V about 3,000.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::buffer::{TRANSPOSED_ROWS, Tile, padded};
use super::decode;
use super::element::Element;
use super::matmul::{Begin, MAX_ROWS, Product};
use super::online_softmax::OnlineSoftmax;
use super::rows::{Alibi, RowTile, Scaling, View};
use super::simd::{Real, tanh};
use crate::params::AttnParams;

/// The tiles that one thread works in.
pub(crate) struct Scratch<T> {
    /// `(head_dim, rows)`: scaled q, transposed. With few rows `(num_kv_heads * rows, head_dim)`.
    pub(crate) q: Tile<T>,
    /// Rows on their way into a transposed tile.
    staging: Tile<T>,
    /// `(keys, head_dim)`.
    pub(crate) k: Tile<T>,
    /// `(keys, head_dim)`.
    pub(crate) v: Tile<T>,
    /// `(keys, rows)`: scores, then probabilities. With few rows `(num_kv_heads * rows, keys)`.
    pub(crate) scores: Tile<T>,
    /// `(rows, head_dim)`, unnormalised; the rows of all tiles of an item, one below the other.
    pub(crate) out: Tile<T>,
    pub(crate) softmax: OnlineSoftmax<T>,
    pub(crate) alibi: Alibi<T>,
}

impl<T: Real> Scratch<T> {
    /// `few_rows_tiles` is the number of tiles that the few-row kernel takes together, if it is used.
    pub(crate) fn new(
        head_dim: usize,
        rows: usize,
        keys: usize,
        few_rows_tiles: Option<usize>,
    ) -> Self {
        let (q, scores) = match few_rows_tiles {
            Some(tiles) => (
                Tile::new(tiles * rows, head_dim),
                Tile::new(keys, tiles * rows),
            ),
            None => (Tile::new(head_dim, rows), Tile::new(keys, rows)),
        };
        let all_rows = few_rows_tiles.unwrap_or(1) * rows;
        Self {
            q,
            staging: Tile::new(TRANSPOSED_ROWS, head_dim),
            k: Tile::new(keys, head_dim),
            v: Tile::new(keys, head_dim),
            scores,
            out: Tile::new(all_rows, head_dim),
            softmax: OnlineSoftmax::new(all_rows),
            alibi: Alibi::new(all_rows),
        }
    }
}

/// The attention of the rows of `tiles` to `keys`; leaves out, max and sum in the scratch.
pub(crate) struct Attend<'a, E: Element> {
    pub(crate) params: &'a AttnParams,
    pub(crate) q: View<'a, E>,
    pub(crate) k: View<'a, E>,
    pub(crate) v: View<'a, E>,
    /// One tile, or with few rows those of all key/value heads.
    pub(crate) tiles: &'a [RowTile],
    pub(crate) keys: Range<usize>,
    /// Keys in one tile.
    pub(crate) tile_n: usize,
    /// Whether to use the kernel for a handful of rows.
    pub(crate) few_rows: bool,
    pub(crate) scratch: &'a mut Scratch<E::Acc>,
}

impl<E: Element> WithSimd for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.scratch.softmax.reset();
        let cols = padded::<E::Acc>(self.params.head_dim);
        for row in 0..self.tiles.iter().map(RowTile::rows).sum() {
            self.scratch.out.row_mut(row, cols).fill(E::Acc::ZERO);
        }
        if self.few_rows {
            decode::attend(simd, self);
        } else {
            attend(simd, self);
        }
    }
}

#[inline(always)]
fn attend<S: Simd, E: Element>(simd: S, attend: Attend<'_, E>) {
    let Attend {
        params,
        q,
        k,
        v,
        tiles,
        keys,
        tile_n,
        scratch,
        ..
    } = attend;
    let tile = &tiles[0];
    let scaling = Scaling::<E::Acc>::new(params);
    let cols = padded::<E::Acc>(params.head_dim);
    let rows = tile.rows();
    scratch.q.load_transposed(
        rows,
        params.head_dim,
        scaling.q,
        &mut scratch.staging,
        |row, line| {
            let (position, head) = tile.row(row);
            q.load(tile.batch, position, head, line);
        },
    );

    let mut first_key = keys.start;
    while first_key < keys.end {
        let keys = first_key..(first_key + tile_n).min(keys.end);
        let masked = !params
            .mask
            .all_visible(tile.positions.clone(), keys.clone());

        k.load_tile(tile.batch, keys.clone(), tile.kv_head, &mut scratch.k);
        multiply_scores(simd, params, tile, keys.clone(), masked, scratch);
        if let Some(factor) = scaling.softcap {
            for key in 0..keys.len() {
                softcap(
                    simd,
                    factor,
                    scratch.scores.row_mut(key, padded::<E::Acc>(rows)),
                );
            }
        }
        if let Some(slopes) = params.alibi_slopes_on_host() {
            scratch.alibi.set(params, slopes, tile, 0, keys.start);
            add_alibi(simd, &scratch.alibi, keys.len(), rows, &mut scratch.scores);
        }
        if masked {
            mask_scores(params, tile, 0, keys.clone(), &mut scratch.scores);
        }

        scratch
            .softmax
            .update(simd, &mut scratch.scores, keys.len(), rows);
        rescale_rows(&scratch.softmax.rescale, 0..rows, cols, &mut scratch.out);

        v.load_tile(tile.batch, keys.clone(), tile.kv_head, &mut scratch.v);
        multiply_values(simd, params, tile, keys.clone(), masked, scratch);
        first_key = keys.end;
    }
}

/// `scores = k · q_t`; of a masked tile only the blocks in which something is visible.
#[inline(always)]
fn multiply_scores<S: Simd, T: Real>(
    simd: S,
    params: &AttnParams,
    tile: &RowTile,
    keys: Range<usize>,
    masked: bool,
    scratch: &mut Scratch<T>,
) {
    /// Keys in a block of a masked tile.
    const BLOCK: usize = 2 * MAX_ROWS;

    let block = if masked { BLOCK } else { keys.len() };
    for first in (0..keys.len()).step_by(block) {
        let count = block.min(keys.len() - first);
        let block_keys = keys.start + first..keys.start + first + count;
        let rows = tile.rows_of_positions(params.mask.rows_of_keys(block_keys));
        // Whole lines, so that vectors stay aligned.
        let (start, end) = (
            rows.start / padded::<T>(1) * padded::<T>(1),
            padded::<T>(rows.end),
        );
        if rows.is_empty() {
            continue;
        }
        simd.vectorize(Product {
            rows: count,
            cols: end - start,
            inner: 0..params.head_dim,
            lhs: scratch.k.lhs(first, 0),
            rhs: scratch.q.rhs(0, start),
            out: scratch.scores.out(first, start),
            begin: Begin::Zero,
        });
    }
}

/// `out += scoresᵀ · v`; of a masked tile each block of rows over the keys that it sees.
#[inline(always)]
fn multiply_values<S: Simd, T: Real>(
    simd: S,
    params: &AttnParams,
    tile: &RowTile,
    keys: Range<usize>,
    masked: bool,
    scratch: &mut Scratch<T>,
) {
    let rows = tile.rows();
    let block = if !masked {
        rows
    } else if all_finite(&scratch.v, keys.len(), params.head_dim) {
        MAX_ROWS
    } else {
        // 0 * NaN is NaN: no row may meet a key that it doesn't see.
        1
    };
    for first in (0..rows).step_by(block) {
        let count = block.min(rows - first);
        let visible = params
            .mask
            .keys_of_rows(tile.positions_of_rows(first..first + count));
        let start = visible.start.clamp(keys.start, keys.end) - keys.start;
        let end = visible.end.clamp(keys.start, keys.end) - keys.start;
        simd.vectorize(Product {
            rows: count,
            cols: padded::<T>(params.head_dim),
            inner: start..end.max(start),
            lhs: scratch.scores.lhs_transposed(first),
            rhs: scratch.v.rhs(0, 0),
            out: scratch.out.out(first, 0),
            begin: Begin::Add,
        });
    }
}

/// `factor * tanh(scores)`, on whole vectors.
#[inline(always)]
pub(crate) fn softcap<S: Simd, T: Real>(simd: S, factor: T, scores: &mut [T]) {
    let factor = T::splat(simd, factor);
    for vector in T::as_vectors_mut::<S>(scores).0 {
        *vector = T::vmul(simd, factor, tanh::<S, T>(simd, *vector));
    }
}

/// `scores += -slope * |aligned key - key|`, one key a line.
#[inline(always)]
pub(crate) fn add_alibi<S: Simd, T: Real>(
    simd: S,
    alibi: &Alibi<T>,
    keys: usize,
    rows: usize,
    scores: &mut Tile<T>,
) {
    let (neg_slope, _) = T::as_vectors::<S>(&alibi.neg_slope);
    let (aligned_key, _) = T::as_vectors::<S>(&alibi.aligned_key);
    for key in 0..keys {
        let index = T::splat(simd, T::from_f64(key as f64));
        let (vectors, _) = T::as_vectors_mut::<S>(scores.row_mut(key, padded::<T>(rows)));
        for ((vector, &neg_slope), &aligned_key) in
            vectors.iter_mut().zip(neg_slope).zip(aligned_key)
        {
            let distance = T::abs(simd, T::vsub(simd, aligned_key, index));
            *vector = T::mul_add(simd, neg_slope, distance, *vector);
        }
    }
}

/// -inf where a row (column) doesn't see a key (line).
#[inline(always)]
pub(crate) fn mask_scores<T: Real>(
    params: &AttnParams,
    tile: &RowTile,
    first_col: usize,
    keys: Range<usize>,
    scores: &mut Tile<T>,
) {
    for (line, key) in keys.enumerate() {
        let rows = tile.rows_of_positions(params.mask.rows_of_keys(key..key + 1));
        let scores = &mut scores.row_mut(line, first_col + tile.rows())[first_col..];
        scores[..rows.start].fill(T::NEG_INFINITY);
        scores[rows.end..].fill(T::NEG_INFINITY);
    }
}

/// Multiplies each row by its factor; most rows have factor 1 after the first few tiles.
#[inline(always)]
pub(crate) fn rescale_rows<T: Real>(
    rescale: &[T],
    rows: Range<usize>,
    cols: usize,
    out: &mut Tile<T>,
) {
    for row in rows {
        let factor = rescale[row];
        if factor != T::ONE {
            for x in out.row_mut(row, cols) {
                *x = *x * factor;
            }
        }
    }
}

/// Whether the first `cols` numbers of the first `rows` rows are all finite.
#[inline(always)]
pub(crate) fn all_finite<T: Real>(tile: &Tile<T>, rows: usize, cols: usize) -> bool {
    (0..rows).all(|row| {
        // x * 0 is 0 for finite x and NaN otherwise; the sum vectorises, a test of each does not.
        tile.row(row, cols)
            .iter()
            .fold(T::ZERO, |sum, &x| sum + x * T::ZERO)
            == T::ZERO
    })
}
