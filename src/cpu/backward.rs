//! The backward pass: dq, dk and dv (FlashAttention-2, Algorithm 2).
//!
//! A work item is a tile of keys of one key/value head and all query rows that see it, of all heads of
//! the group, so dk and dv are sums of one thread and need no atomics:
//!
//! ```text
//! k_t, v_t = transposes of k and v                      once, head_dim x keys
//! for each tile of query rows that see some key, in ascending order:
//!     scores  = scale * q · k_t                         rows x keys, as in the forward
//!     dprobs  = dout · v_t
//!     probs   = 2^(scores - max - log2(sum))
//!     dscores = probs * (dprobs - delta)                delta = rowsum(dout * out)
//!     dv     += probsᵀ · dout
//!     dk     += dscoresᵀ · q
//!     dq     += dscores · k                             in the order of the key tiles
//! ```
//!
//! dq is the one sum across items. It is kept in order without a buffer for each item: every query tile
//! counts the key tiles that it has taken in, and an item waits until its turn has come. Items are
//! claimed in ascending order of their key tile, so the item that is waited for is running or done,
//! and with several heads or batch items in between it is almost always done. So dq, too, has the same
//! bits whatever the number of threads.
//!
//! The score of a row and key is summed in the forward's order and has the same bits; the maximum that
//! the forward found is taken off it before anything is rounded to the size of the sum. With a single
//! lse in f32, scores of 10^6 would leave nothing of the difference.
//!
//! Masked tiles are treated as in the forward; a NaN in a hidden row or key meets no product.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pulp::{Simd, WithSimd};

use super::buffer::{TRANSPOSED_ROWS, Tile, padded};
use super::element::Element;
use super::forward::all_finite;
use super::matmul::{Begin, Lhs, Out, Product, Rhs};
use super::rows::{Alibi, RowTile, RowTiling, Scaling, View};
use super::simd::{Real, arch, exp2, tanh};
use super::{SharedSlice, for_each_item};
use crate::params::AttnParams;

/// (rows, keys) of a tile: the ten tiles of the scratch stay within 512 KiB up to head_dim 128 in f32.
const fn tile_sizes<T>(head_dim: usize) -> (usize, usize) {
    match head_dim * size_of::<T>() {
        0..=256 => (96, 128),
        257..=512 => (96, 64),
        _ => (48, 48),
    }
}

/// Computes `[dq, dk, dv]`, contiguous. `stats` is what the forward left.
pub(crate) fn backward<E: Element>(
    params: &AttnParams,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
    out: View<'_, E>,
    dout: View<'_, E>,
    stats: &[E::Acc],
) -> [Vec<E>; 3] {
    let AttnParams {
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *params;
    let mut dq: Vec<E::Acc> = bytemuck::zeroed_vec(batch * seqlen_q * num_heads * head_dim);
    let mut dk: Vec<E> = bytemuck::zeroed_vec(batch * seqlen_k * num_kv_heads * head_dim);
    let mut dv: Vec<E> = bytemuck::zeroed_vec(dk.len());
    if dq.is_empty() || dk.is_empty() {
        return [E::narrow_all(dq), dk, dv];
    }

    let delta = row_sums(params, out, dout);
    let (max_rows, max_keys) = tile_sizes::<E::Acc>(head_dim);
    let tiling = RowTiling::new(params, max_rows);
    let kv_heads = batch * num_kv_heads;
    let query_tiles = tiling.head_blocks * tiling.m_tiles;
    let turns = Turns::new(kv_heads * query_tiles, |index| {
        let m_tile = index % tiling.m_tiles;
        let positions = tiling.tile(0, 0, 0, m_tile).positions;
        params.mask.keys_of_rows(positions).start / max_keys
    });
    let rows = Rows {
        delta: &delta,
        stats,
    };
    let shared_dq = SharedSlice::new(&mut dq);
    let shared_dk = SharedSlice::new(&mut dk);
    let shared_dv = SharedSlice::new(&mut dv);

    for_each_item(
        seqlen_k.div_ceil(max_keys) * kv_heads,
        batch * num_heads * seqlen_q * seqlen_k * head_dim * 5,
        || Scratch::<E::Acc>::new(head_dim, tiling.max_rows(), max_keys),
        |scratch, item| {
            let (n_tile, batch_and_head) = (item / kv_heads, item % kv_heads);
            let (batch, kv_head) = tiling.batch_and_kv_head(batch_and_head);
            let keys = n_tile * max_keys..((n_tile + 1) * max_keys).min(seqlen_k);
            // If this thread unwinds, those that wait for its turns must not wait for ever.
            let _guard = turns.release_on_unwind();
            arch().dispatch(LoadKeys {
                params,
                k,
                v,
                batch,
                kv_head,
                keys: keys.clone(),
                scratch,
            });
            for m_tile in tiling.m_tiles_of(params.mask.rows_of_keys(keys.clone())) {
                for head_block in 0..tiling.head_blocks {
                    let tile = tiling.tile(batch, kv_head, head_block, m_tile);
                    arch().dispatch(Step {
                        params,
                        q,
                        dout,
                        rows,
                        tile: &tile,
                        keys: keys.clone(),
                        scratch,
                    });
                    let turn = (batch_and_head * tiling.head_blocks + head_block) * tiling.m_tiles
                        + m_tile;
                    if !turns.wait(turn, n_tile) {
                        return;
                    }
                    let factor = Scaling::<E::Acc>::new(params).dq;
                    for row in 0..tile.rows() {
                        let (position, head) = tile.row(row);
                        let start = ((batch * seqlen_q + position) * num_heads + head) * head_dim;
                        // SAFETY: these rows belong to this query tile alone, and its turn belongs to
                        // this item until `finish`; dq outlives the call.
                        let dq_row = unsafe { shared_dq.slice_mut(start, head_dim) };
                        for (dq, &x) in dq_row.iter_mut().zip(scratch.dq.row(row, head_dim)) {
                            *dq = *dq + factor * x;
                        }
                    }
                    turns.finish(turn, n_tile);
                }
            }
            let factor = Scaling::<E::Acc>::new(params).dk;
            for key in keys.clone() {
                let start = ((batch * seqlen_k + key) * num_kv_heads + kv_head) * head_dim;
                let line = key - keys.start;
                for x in scratch.dk.row_mut(line, head_dim) {
                    *x = *x * factor;
                }
                // SAFETY: each (batch, key, kv_head) is in exactly one item; dk and dv outlive the call.
                let (dk, dv) = unsafe {
                    (
                        shared_dk.slice_mut(start, head_dim),
                        shared_dv.slice_mut(start, head_dim),
                    )
                };
                E::narrow(scratch.dk.row(line, head_dim), dk);
                E::narrow(scratch.dv.row(line, head_dim), dv);
            }
        },
    );
    [E::narrow_all(dq), dk, dv]
}

/// `delta = rowsum(dout * out)`, `(batch, num_heads, seqlen_q)`.
fn row_sums<E: Element>(params: &AttnParams, out: View<'_, E>, dout: View<'_, E>) -> Vec<E::Acc> {
    let AttnParams {
        batch,
        seqlen_q,
        num_heads,
        head_dim,
        ..
    } = *params;
    let mut delta = vec![E::Acc::ZERO; batch * num_heads * seqlen_q];
    let shared = SharedSlice::new(&mut delta);
    let blocks = seqlen_q.div_ceil(TRANSPOSED_ROWS);
    for_each_item(
        batch * num_heads * blocks,
        batch * num_heads * seqlen_q * head_dim,
        || RowSumScratch::new(head_dim),
        |scratch, item| {
            let (head_index, block) = (item / blocks, item % blocks);
            let first = block * TRANSPOSED_ROWS;
            let positions = first..(first + TRANSPOSED_ROWS).min(seqlen_q);
            // SAFETY: each row is in exactly one item; delta outlives the call.
            let sums = unsafe { shared.slice_mut(head_index * seqlen_q + first, positions.len()) };
            arch().dispatch(RowSums {
                out,
                dout,
                batch: head_index / num_heads,
                head: head_index % num_heads,
                positions,
                head_dim,
                scratch,
                sums,
            });
        },
    );
    delta
}

struct RowSumScratch<T> {
    /// `(head_dim, TRANSPOSED_ROWS)`.
    out_t: Tile<T>,
    dout_t: Tile<T>,
    staging: Tile<T>,
}

impl<T: Real> RowSumScratch<T> {
    fn new(head_dim: usize) -> Self {
        Self {
            out_t: Tile::new(head_dim, TRANSPOSED_ROWS),
            dout_t: Tile::new(head_dim, TRANSPOSED_ROWS),
            staging: Tile::new(TRANSPOSED_ROWS, head_dim),
        }
    }
}

/// The row sums of up to `TRANSPOSED_ROWS` positions of one head, a row a lane.
///
/// Each is summed in the order in which the tile product sums `dout · v`: a row that sees one key has
/// `out = v`, and the difference of the two, which is its gradient, is then exactly 0.
struct RowSums<'a, E: Element> {
    out: View<'a, E>,
    dout: View<'a, E>,
    batch: usize,
    head: usize,
    positions: Range<usize>,
    head_dim: usize,
    scratch: &'a mut RowSumScratch<E::Acc>,
    sums: &'a mut [E::Acc],
}

impl<E: Element> WithSimd for RowSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let RowSumScratch {
            out_t,
            dout_t,
            staging,
        } = self.scratch;
        let (count, head_dim) = (self.positions.len(), self.head_dim);
        for (tile, view) in [(&mut *out_t, self.out), (&mut *dout_t, self.dout)] {
            tile.load_transposed(count, head_dim, E::Acc::ONE, staging, |row, line| {
                view.load(self.batch, self.positions.start + row, self.head, line);
            });
        }
        let mut sums = [E::Acc::ZERO; TRANSPOSED_ROWS];
        let (vectors, _) = E::Acc::as_vectors_mut::<S>(&mut sums);
        for d in 0..head_dim {
            let (out, _) = E::Acc::as_vectors::<S>(out_t.row(d, TRANSPOSED_ROWS));
            let (dout, _) = E::Acc::as_vectors::<S>(dout_t.row(d, TRANSPOSED_ROWS));
            for ((sum, &out), &dout) in vectors.iter_mut().zip(out).zip(dout) {
                *sum = E::Acc::mul_add(simd, dout, out, *sum);
            }
        }
        self.sums.copy_from_slice(&sums[..count]);
    }
}

/// Whose turn it is to add to each query tile's dq.
struct Turns {
    /// For each query tile the key tile that adds next.
    next: Vec<AtomicUsize>,
    abandoned: AtomicBool,
}

impl Turns {
    fn new(count: usize, first: impl Fn(usize) -> usize) -> Self {
        Self {
            next: (0..count).map(|i| AtomicUsize::new(first(i))).collect(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Waits until all earlier key tiles have added to a query tile; false if one never will.
    fn wait(&self, query_tile: usize, key_tile: usize) -> bool {
        /// Rounds of spinning, a few microseconds, before the core is offered to others.
        const SPINS: usize = 256;
        let mut rounds = 0;
        // Acquire: what the previous key tile added is seen once its `finish` is.
        while self.next[query_tile].load(Ordering::Acquire) != key_tile {
            if self.abandoned.load(Ordering::Relaxed) {
                return false;
            }
            rounds += 1;
            if rounds < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        true
    }

    fn finish(&self, query_tile: usize, key_tile: usize) {
        // Release: publishes what was added, to the Acquire in `wait`.
        self.next[query_tile].store(key_tile + 1, Ordering::Release);
    }

    fn release_on_unwind(&self) -> impl Drop + '_ {
        struct Guard<'a>(&'a Turns);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.abandoned.store(true, Ordering::Relaxed);
                }
            }
        }
        Guard(self)
    }
}

/// What is known of each query row beforehand.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    /// `(batch, num_heads, seqlen_q)`.
    delta: &'a [T],
    /// `(2, batch, num_heads, seqlen_q)`: maximum, log2 of the sum.
    stats: &'a [T],
}

/// The tiles that one thread works in.
struct Scratch<T> {
    /// `(head_dim, keys)`.
    k_t: Tile<T>,
    v_t: Tile<T>,
    /// `(keys, head_dim)`.
    k: Tile<T>,
    dk: Tile<T>,
    dv: Tile<T>,
    /// `(rows, head_dim)`: scaled q, dout, and this step's share of dq.
    q: Tile<T>,
    dout: Tile<T>,
    dq: Tile<T>,
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
    fn new(head_dim: usize, rows: usize, keys: usize) -> Self {
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
struct LoadKeys<'a, E: Element> {
    params: &'a AttnParams,
    k: View<'a, E>,
    v: View<'a, E>,
    batch: usize,
    kv_head: usize,
    keys: Range<usize>,
    scratch: &'a mut Scratch<E::Acc>,
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
struct Step<'a, E: Element> {
    params: &'a AttnParams,
    q: View<'a, E>,
    dout: View<'a, E>,
    rows: Rows<'a, E::Acc>,
    tile: &'a RowTile,
    keys: Range<usize>,
    scratch: &'a mut Scratch<E::Acc>,
}

/// Query rows, or keys, that a product of a masked tile takes together.
const MASKED_BLOCK: usize = 6;

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
                MASKED_BLOCK
            } else {
                // 0 * NaN is NaN: no row may meet a key that it doesn't see.
                1
            },
        };

        band.rows_by_keys(simd, &scratch.q, &scratch.k_t, &mut scratch.probs);
        band.rows_by_keys(simd, &scratch.dout, &scratch.v_t, &mut scratch.dscores);
        if let Some(slopes) = &params.alibi_slopes {
            scratch.alibi.set(params, slopes, tile, keys.start);
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
            let out_stride = out.stride();
            simd.vectorize(Product {
                rows: block.len(),
                cols: end - start,
                inner: 0..self.params.head_dim,
                lhs: Lhs {
                    data: &lhs.data()[block.start * lhs.stride()..],
                    row_stride: lhs.stride(),
                    col_stride: 1,
                },
                rhs: Rhs {
                    data: &rhs_t.data()[start..],
                    row_stride: rhs_t.stride(),
                },
                out: Out {
                    data: &mut out.data_mut()[block.start * out_stride + start..],
                    row_stride: out_stride,
                },
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
            let out_stride = out.stride();
            simd.vectorize(Product {
                rows: block.len(),
                cols: padded::<T>(self.params.head_dim),
                inner: self.rows_of_keys(block.clone()),
                lhs: Lhs {
                    data: &lhs.data()[block.start..],
                    row_stride: 1,
                    col_stride: lhs.stride(),
                },
                rhs: Rhs {
                    data: rhs.data(),
                    row_stride: rhs.stride(),
                },
                out: Out {
                    data: &mut out.data_mut()[block.start * out_stride..],
                    row_stride: out_stride,
                },
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
            let out_stride = out.stride();
            simd.vectorize(Product {
                rows: block.len(),
                cols: padded::<T>(self.params.head_dim),
                inner: self.keys_of_rows(block.clone()),
                lhs: Lhs {
                    data: &lhs.data()[block.start * lhs.stride()..],
                    row_stride: lhs.stride(),
                    col_stride: 1,
                },
                rhs: Rhs {
                    data: rhs.data(),
                    row_stride: rhs.stride(),
                },
                out: Out {
                    data: &mut out.data_mut()[block.start * out_stride..],
                    row_stride: out_stride,
                },
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
