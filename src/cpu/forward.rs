//! The forward pass: out and the softmax statistics (FlashAttention-2, Algorithm 1).
//!
//! A work item is a tile of query rows, all heads of a group together, and all keys that they see. The
//! scores are computed transposed, keys by rows, which keeps every transposition out of the loop:
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
//! Few long rows (a short prompt on a long cache) are split over keys as well, by a rule that looks at
//! the shape only; the parts are put together in order, so the result does not depend on the threads.
//!
//! Cost at head_dim 128, rows 192, keys 96, AVX-512: the two products take 2 * 192 * 96 * 128 / 32 =
//! 147,000 cycles, the exponentials about 7,000, loading and widening K and V about 3,000.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::buffer::{TRANSPOSED_ROWS, Tile, padded};
use super::decode;
use super::element::Element;
use super::matmul::{Begin, Lhs, Out, Product, Rhs};
use super::online_softmax::OnlineSoftmax;
use super::rows::{Alibi, RowTile, RowTiling, Scaling, View};
use super::simd::{Real, arch, lanes, tanh};
use super::{SharedSlice, for_each_item};
use crate::params::AttnParams;

/// (rows, keys) of a tile. q_t, out, k, v and the scores stay within 512 KiB, the smallest L2 of the
/// machines that matter, up to head_dim 128 in f32; rows above 96 amortise the loading of K and V.
/// Both are multiples of the micro-kernel's six rows.
const fn tile_sizes<T>(head_dim: usize) -> (usize, usize) {
    match head_dim * size_of::<T>() {
        0..=512 => (192, 96),
        513..=1024 => (96, 96),
        _ => (48, 48),
    }
}

/// Fewer work items than this are split over keys. It is a constant, not the number of threads, so that
/// the bits of the result do not depend on the machine's cores.
const MIN_ITEMS: usize = 32;

/// Keys in a part at least: with fewer, loading the queries again and combining the parts costs more
/// than other cores gain. A handful of rows costs little of either.
const fn min_keys_of_part(few_rows: bool) -> usize {
    if few_rows { 128 } else { 512 }
}

/// Computes `(out, stats)`; see [`ForwardOutput`](super::ForwardOutput) for their shapes.
pub(crate) fn forward<E: Element>(
    params: &AttnParams,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
    for_backward: bool,
) -> (Vec<E>, Vec<E::Acc>) {
    let AttnParams {
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *params;
    let stats_len = batch * num_heads * seqlen_q;
    let mut out: Vec<E> = bytemuck::zeroed_vec(stats_len * head_dim);
    let mut stats = vec![E::Acc::NEG_INFINITY; 2 * stats_len];
    if stats_len == 0 || seqlen_k == 0 {
        return (out, stats);
    }

    let (max_rows, max_keys) = tile_sizes::<E::Acc>(head_dim);
    let tiling = RowTiling::new(params, max_rows);
    // The few-row kernel sums scores in another order than the backward does.
    let few_rows = !for_backward && tiling.max_rows() <= decode::MAX_ROWS;
    // It also takes all heads together: they lie side by side in K and V, on the same pages.
    let tiles_of_item = if few_rows { num_kv_heads } else { 1 };
    let max_keys = if few_rows {
        decode::tile_keys::<E::Acc>(num_kv_heads, head_dim)
    } else {
        max_keys
    };
    let items = batch * num_kv_heads * tiling.head_blocks * tiling.m_tiles / tiles_of_item;
    let parts = MIN_ITEMS
        .div_ceil(items)
        .min(seqlen_k / min_keys_of_part(few_rows))
        .max(1);

    let mut partial =
        Partial::<E::Acc>::new(if parts > 1 { parts * stats_len } else { 0 }, head_dim);
    let shared_out = SharedSlice::new(&mut out);
    let shared_stats = SharedSlice::new(&mut stats);
    let shared_partial = partial.share();

    for_each_item(
        items * parts,
        stats_len * seqlen_k * head_dim * 2,
        || {
            let rows = tiling.max_rows();
            Scratch::<E::Acc>::new(head_dim, rows, max_keys, few_rows.then_some(tiles_of_item))
        },
        |scratch, item| {
            let (item, part) = (item / parts, item % parts);
            let tiles: Vec<RowTile> = (item * tiles_of_item..(item + 1) * tiles_of_item)
                .map(|index| tiling.longest_first(batch, index))
                .collect();
            let visible = params.mask.keys_of_rows(tiles[0].positions.clone());
            let keys = visible.start + visible.len() * part / parts
                ..visible.start + visible.len() * (part + 1) / parts;

            arch().dispatch(Attend {
                params,
                q,
                k,
                v,
                tiles: &tiles,
                keys,
                max_keys,
                few_rows,
                scratch,
            });

            let mut line = 0;
            for tile in &tiles {
                for row in 0..tile.rows() {
                    let (position, head) = tile.row(row);
                    let out_row = (tile.batch * seqlen_q + position) * num_heads + head;
                    let stats_row = (tile.batch * num_heads + head) * seqlen_q + position;
                    let (max, sum) = (scratch.softmax.max[line], scratch.softmax.sum[line]);
                    let acc = scratch.out.row_mut(line, head_dim);
                    // SAFETY: each (batch, position, head) is in exactly one tile and each part of it
                    // in one item, so no other item touches these elements; all slices outlive the
                    // call.
                    unsafe {
                        if parts == 1 {
                            finish_row::<E>(
                                acc,
                                max,
                                sum,
                                shared_out.slice_mut(out_row * head_dim, head_dim),
                                &mut shared_stats.slice_mut(stats_row, 1)[0],
                                &mut shared_stats.slice_mut(stats_len + stats_row, 1)[0],
                            );
                        } else {
                            shared_partial.store(part * stats_len + out_row, acc, max, sum);
                        }
                    }
                    line += 1;
                }
            }
        },
    );
    if parts > 1 {
        combine::<E>(params, parts, &partial, &mut out, &mut stats);
    }
    (out, stats)
}

/// Divides by the row's sum, rounds, and stores out and the statistics of one row.
fn finish_row<E: Element>(
    acc: &mut [E::Acc],
    max: E::Acc,
    sum: E::Acc,
    out: &mut [E],
    out_max: &mut E::Acc,
    out_log_sum: &mut E::Acc,
) {
    // A row that sees no key keeps out = 0 and lse = -inf; a NaN sum is not equal to 0 and goes on.
    if sum == E::Acc::ZERO {
        return;
    }
    for x in acc.iter_mut() {
        *x = *x / sum;
    }
    E::narrow(acc, out);
    *out_max = max;
    *out_log_sum = E::Acc::from_f64(sum.to_f64().log2());
}

/// What each part of the keys left of each row: `(parts, batch, seqlen_q, num_heads, ...)`.
struct Partial<T> {
    out: Vec<T>,
    max: Vec<T>,
    sum: Vec<T>,
}

impl<T: Real> Partial<T> {
    fn new(rows: usize, head_dim: usize) -> Self {
        Self {
            out: bytemuck::zeroed_vec(rows * head_dim),
            max: vec![T::NEG_INFINITY; rows],
            sum: vec![T::ZERO; rows],
        }
    }

    fn share(&mut self) -> SharedPartial<T> {
        SharedPartial {
            out: SharedSlice::new(&mut self.out),
            max: SharedSlice::new(&mut self.max),
            sum: SharedSlice::new(&mut self.sum),
        }
    }
}

/// A [`Partial`] whose rows are written by several threads.
#[derive(Clone, Copy)]
struct SharedPartial<T> {
    out: SharedSlice<T>,
    max: SharedSlice<T>,
    sum: SharedSlice<T>,
}

impl<T: Real> SharedPartial<T> {
    /// # Safety
    ///
    /// The `Partial` must be alive, and no other thread may store this row.
    unsafe fn store(self, row: usize, out: &[T], max: T, sum: T) {
        // SAFETY: passed on from the caller.
        unsafe {
            self.out
                .slice_mut(row * out.len(), out.len())
                .copy_from_slice(out);
            self.max.slice_mut(row, 1)[0] = max;
            self.sum.slice_mut(row, 1)[0] = sum;
        }
    }
}

/// Adds up the parts of every row, in order.
fn combine<E: Element>(
    params: &AttnParams,
    parts: usize,
    partial: &Partial<E::Acc>,
    out: &mut [E],
    stats: &mut [E::Acc],
) {
    let AttnParams {
        seqlen_q,
        num_heads,
        head_dim,
        ..
    } = *params;
    let (maxima, log_sums) = stats.split_at_mut(stats.len() / 2);
    let rows = maxima.len();
    let mut acc = vec![E::Acc::ZERO; head_dim];
    for row in 0..rows {
        let max = (0..parts)
            .map(|part| partial.max[part * rows + row])
            .fold(E::Acc::NEG_INFINITY, |a, b| if b > a { b } else { a });
        acc.fill(E::Acc::ZERO);
        let mut sum = E::Acc::ZERO;
        for part in 0..parts {
            let row = part * rows + row;
            // A part without visible keys has sum 0, and its maximum, -inf, must not be subtracted.
            if partial.sum[row] == E::Acc::ZERO {
                continue;
            }
            let weight = E::Acc::from_f64((partial.max[row].to_f64() - max.to_f64()).exp2());
            sum = sum + partial.sum[row] * weight;
            for (acc, &x) in acc.iter_mut().zip(&partial.out[row * head_dim..]) {
                *acc = *acc + x * weight;
            }
        }
        let (batch, position, head) = (
            row / (seqlen_q * num_heads),
            row / num_heads % seqlen_q,
            row % num_heads,
        );
        let stats_row = (batch * num_heads + head) * seqlen_q + position;
        finish_row::<E>(
            &mut acc,
            max,
            sum,
            &mut out[row * head_dim..][..head_dim],
            &mut maxima[stats_row],
            &mut log_sums[stats_row],
        );
    }
}

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
    fn new(head_dim: usize, rows: usize, keys: usize, few_rows_tiles: Option<usize>) -> Self {
        let (q, scores) = match few_rows_tiles {
            Some(tiles) => (
                Tile::new(tiles * rows, head_dim),
                Tile::new(tiles * rows, keys),
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
            alibi: Alibi::new(rows),
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
    pub(crate) max_keys: usize,
    few_rows: bool,
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
        max_keys,
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
        let keys = first_key..(first_key + max_keys).min(keys.end);
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
        if let Some(slopes) = &params.alibi_slopes {
            scratch.alibi.set(params, slopes, tile, keys.start);
            add_alibi(simd, &scratch.alibi, keys.len(), rows, &mut scratch.scores);
        }
        if masked {
            mask_scores(params, tile, keys.clone(), &mut scratch.scores);
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
    const BLOCK: usize = 12;

    let (k_stride, q_stride, scores_stride) = (
        scratch.k.stride(),
        scratch.q.stride(),
        scratch.scores.stride(),
    );
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
            lhs: Lhs {
                data: &scratch.k.data()[first * k_stride..],
                row_stride: k_stride,
                col_stride: 1,
            },
            rhs: Rhs {
                data: &scratch.q.data()[start..],
                row_stride: q_stride,
            },
            out: Out {
                data: &mut scratch.scores.data_mut()[first * scores_stride + start..],
                row_stride: scores_stride,
            },
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
    let (v_stride, out_stride, scores_stride) = (
        scratch.v.stride(),
        scratch.out.stride(),
        scratch.scores.stride(),
    );
    let rows = tile.rows();
    let block = if !masked {
        rows
    } else if all_finite(&scratch.v, keys.len(), params.head_dim) {
        6
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
            lhs: Lhs {
                data: &scratch.scores.data()[first..],
                row_stride: 1,
                col_stride: scores_stride,
            },
            rhs: Rhs {
                data: scratch.v.data(),
                row_stride: v_stride,
            },
            out: Out {
                data: &mut scratch.out.data_mut()[first * out_stride..],
                row_stride: out_stride,
            },
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
fn add_alibi<S: Simd, T: Real>(
    simd: S,
    alibi: &Alibi<T>,
    keys: usize,
    rows: usize,
    scores: &mut Tile<T>,
) {
    let lanes = lanes::<S, T>();
    let (neg_slope, _) = T::as_vectors::<S>(&alibi.neg_slope);
    let (aligned_key, _) = T::as_vectors::<S>(&alibi.aligned_key);
    for key in 0..keys {
        let index = T::splat(simd, T::from_f64(key as f64));
        let (vectors, _) = T::as_vectors_mut::<S>(scores.row_mut(key, padded::<T>(rows)));
        debug_assert!(vectors.len() * lanes <= alibi.neg_slope.len());
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
fn mask_scores<T: Real>(
    params: &AttnParams,
    tile: &RowTile,
    keys: Range<usize>,
    scores: &mut Tile<T>,
) {
    let cols = padded::<T>(tile.rows());
    for (line, key) in keys.enumerate() {
        let rows = tile.rows_of_positions(params.mask.rows_of_keys(key..key + 1));
        let scores = scores.row_mut(line, cols);
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
