//! The forward pass for a handful of query rows: decoding on a long cache, bound by reading K and V.
//!
//! With so few rows the [tile kernel](super::forward_tile)'s vectors would be mostly empty. Here a score
//! is a dot product along head_dim, and all key/value heads of a sequence are taken together, a few keys
//! at a time: every row of K and V is read once, about in the order in which the rows lie in memory.
//! The scores are keys by rows, as in the tile kernel, with the rows of all heads side by side.
//!
//! With 32/8 heads, head_dim 128, AVX-512 and K and V in L2, a row of K and V together costs about 110
//! cycles on a Zen 5 core in f32: 28 for the products with q, 11 for their sums across lanes, 39 for the
//! values, 13 for the softmax, and prefetches and bookkeeping (shares of a profile, at 4.3 GHz, taken with
//! a block's prefetches at once). Conversions of half types happen in
//! registers on the way.

use std::ops::Range;

use pulp::Simd;

use super::buffer::{LINE_BYTES, Tile, padded};
use super::element::Element;
use super::forward_tile::{Attend, add_alibi, mask_scores, rescale_rows, softcap};
use super::matmul::Rhs;
use super::rows::{RowTile, Scaling};
use super::simd::{Real, lanes, prefetch, sums};

/// Keys of a head that are multiplied before the next head's: with as many rows they make 16 sums, and
/// each vector of out is read and written once for all of them.
const BLOCK: usize = 4;
/// The same with 16 registers.
const BLOCK_16_REGISTERS: usize = 2;
/// Rows that are multiplied together.
const ROWS: usize = 4;

/// Keys in a tile: the scores of 32 rows take 24 KiB in f32, half of a Zen 5 core's L1.
pub(crate) const TILE_KEYS: usize = 128;

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
    let cols = padded::<E::Acc>(head_dim);
    let scaling = Scaling::<E::Acc>::new(params);
    let mut staging = Tile::<E>::new(BLOCK, head_dim);
    let ahead = keys_ahead::<E>(tiles.len(), head_dim);

    // Each tile with the lines that its rows take in q, out and the softmax: columns of the scores.
    let mut rows = 0;
    let tiles: Vec<(&RowTile, Range<usize>)> = tiles
        .iter()
        .map(|tile| {
            let first = rows;
            rows += tile.rows();
            (tile, first..rows)
        })
        .collect();
    for (tile, lines) in &tiles {
        for (row, line) in lines.clone().enumerate() {
            let (position, head) = tile.row(row);
            let line = scratch.q.row_mut(line, head_dim);
            q.load(tile.batch, position, head, line);
            for x in line {
                *x = *x * scaling.q;
            }
        }
    }

    let mut first_key = all_keys.start;
    while first_key < all_keys.end {
        let keys = first_key..(first_key + tile_n).min(all_keys.end);

        for block in blocks(keys.clone()) {
            for (tile, lines) in &tiles {
                let mut scores = Scores {
                    q: &scratch.q,
                    scores: &mut scratch.scores,
                    cols,
                    ahead,
                };
                scores.multiply(
                    simd,
                    lines.clone(),
                    block.start - keys.start..block.end - keys.start,
                    k.rows(tile.batch, block.clone(), tile.kv_head, &mut staging),
                );
            }
        }

        if let Some(factor) = scaling.softcap {
            for key in 0..keys.len() {
                let scores = scratch.scores.row_mut(key, padded::<E::Acc>(rows));
                softcap(simd, factor, scores);
            }
        }
        if let Some(slopes) = params.alibi_slopes_on_host() {
            for (tile, lines) in &tiles {
                scratch
                    .alibi
                    .set(params, slopes, tile, lines.start, keys.start);
            }
            add_alibi(simd, &scratch.alibi, keys.len(), rows, &mut scratch.scores);
        }
        for (tile, lines) in &tiles {
            let visible = tile.positions.clone();
            if !params.mask.all_visible(visible, keys.clone()) {
                let scores = &mut scratch.scores;
                mask_scores(params, tile, lines.start, keys.clone(), scores);
            }
        }
        scratch
            .softmax
            .update(simd, &mut scratch.scores, keys.len(), rows);
        rescale_rows(&scratch.softmax.rescale, 0..rows, cols, &mut scratch.out);

        for block in blocks(keys.clone()) {
            for (tile, lines) in &tiles {
                let v_rows = v.rows(tile.batch, block.clone(), tile.kv_head, &mut staging);
                let mut values = Values {
                    probs: &scratch.scores,
                    out: &mut scratch.out,
                    cols,
                    ahead,
                };
                let positions = tile.positions.clone();
                if params.mask.all_visible(positions, block.clone()) {
                    let block = block.start - keys.start..block.end - keys.start;
                    values.multiply(simd, lines.clone(), block, v_rows);
                    continue;
                }
                // Each row over exactly the keys that it sees, since 0 * NaN is NaN.
                for (row, line) in lines.clone().enumerate() {
                    let visible = params.mask.keys_of_row(tile.row(row).0);
                    let start = visible.start.clamp(block.start, block.end);
                    let end = visible.end.clamp(start, block.end);
                    if start < end {
                        let v_rows = v_rows.skip(start - block.start);
                        let block = start - keys.start..end - keys.start;
                        values.multiply(simd, line..line + 1, block, v_rows);
                    }
                }
            }
        }
        first_key = keys.end;
    }
}

/// Keys in blocks that are multiplied with all heads in turn.
fn blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    keys.clone()
        .step_by(BLOCK)
        .map(move |first| first..(first + BLOCK).min(keys.end))
}

/// How many keys before their turn the rows of K and V are asked for: what is asked for stays in L1.
///
/// The heads of four keys lie on four pages and no hardware prefetcher follows that: without these
/// prefetches 8192 keys of 32/8 heads, head_dim 128 in f32 read memory at 0.3 of the speed of a linear
/// pass. 8 KiB ahead reaches 0.5 to 0.65, 16 KiB 0.6 to 0.85, 32 KiB 0.55 to 0.7. Lines asked for between the
/// multiplications of each vector took 0.71 ms in half types where a block's lines at once took 0.79,
/// perhaps because those are more than the misses that an L1 can have open.
const fn keys_ahead<E>(heads: usize, head_dim: usize) -> usize {
    const AHEAD_BYTES: usize = 16 << 10;
    let keys = AHEAD_BYTES / (heads * head_dim * size_of::<E>()) / BLOCK * BLOCK;
    match keys {
        0 => BLOCK,
        1..TILE_KEYS => keys,
        _ => TILE_KEYS,
    }
}

/// Asks for the cache line that begins at number `col` of a row, if one does.
#[inline(always)]
fn prefetch_line<E>(row: *const E, col: usize) {
    if (col * size_of::<E>()).is_multiple_of(LINE_BYTES) {
        prefetch(row.wrapping_add(col));
    }
}

/// A product of query rows with rows of K or V, in blocks whose sums stay in registers.
trait Multiply<T: Real> {
    /// Numbers in a row of K or V that are multiplied, whole vectors.
    fn cols(&self) -> usize;

    /// How many keys before their turn the rows of K or V are asked for.
    fn ahead(&self) -> usize;

    /// One block: `R` lines from `line` on and `K` keys from `key` on.
    ///
    /// # Safety
    ///
    /// `cols` numbers must be readable from each pointer of `rhs` on. What lies `ahead` numbers further
    /// is asked for, and may be anything.
    unsafe fn block<S: Simd, E: Element<Acc = T>, const R: usize, const K: usize>(
        &mut self,
        simd: S,
        line: usize,
        key: usize,
        rhs: [*const E; K],
        ahead: usize,
    );

    /// All of `lines` and `keys`; the first row of `rhs` belongs to the first key.
    #[inline(always)]
    fn multiply<S: Simd, E: Element<Acc = T>>(
        &mut self,
        simd: S,
        lines: Range<usize>,
        keys: Range<usize>,
        rhs: Rhs<'_, E>,
    ) {
        for line in lines.clone().step_by(ROWS) {
            match lines.end - line {
                1 => self.rows::<S, E, 1>(simd, line, keys.clone(), rhs),
                2 => self.rows::<S, E, 2>(simd, line, keys.clone(), rhs),
                3 => self.rows::<S, E, 3>(simd, line, keys.clone(), rhs),
                _ => self.rows::<S, E, ROWS>(simd, line, keys.clone(), rhs),
            }
        }
    }

    #[inline(always)]
    fn rows<S: Simd, E: Element<Acc = T>, const R: usize>(
        &mut self,
        simd: S,
        line: usize,
        keys: Range<usize>,
        rhs: Rhs<'_, E>,
    ) {
        let mut done = 0;
        while done < keys.len() {
            let (key, rest) = (keys.start + done, keys.len() - done);
            let rhs = rhs.skip(done);
            done += if S::REGISTER_COUNT >= 32 && rest >= BLOCK {
                self.checked_block::<S, E, R, BLOCK>(simd, line, key, rhs)
            } else if rest >= BLOCK_16_REGISTERS {
                self.checked_block::<S, E, R, BLOCK_16_REGISTERS>(simd, line, key, rhs)
            } else {
                self.checked_block::<S, E, R, 1>(simd, line, key, rhs)
            };
        }
    }

    /// [`Multiply::block`] for the first `K` rows of `rhs`; returns `K`.
    #[inline(always)]
    fn checked_block<S: Simd, E: Element<Acc = T>, const R: usize, const K: usize>(
        &mut self,
        simd: S,
        line: usize,
        key: usize,
        rhs: Rhs<'_, E>,
    ) -> usize {
        let mut rows = [std::ptr::null(); K];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = rhs.data[j * rhs.row_stride..][..self.cols()].as_ptr();
        }
        let ahead = self.ahead() * rhs.row_stride;
        // SAFETY: each pointer is that of a slice of `cols` numbers.
        unsafe { self.block::<S, E, R, K>(simd, line, key, rows, ahead) };
        K
    }
}

/// `scores[key][line] = q[line] · k[key]`.
struct Scores<'a, T> {
    q: &'a Tile<T>,
    scores: &'a mut Tile<T>,
    cols: usize,
    ahead: usize,
}

impl<T: Real> Multiply<T> for Scores<'_, T> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn ahead(&self) -> usize {
        self.ahead
    }

    #[inline(always)]
    unsafe fn block<S: Simd, E: Element<Acc = T>, const R: usize, const K: usize>(
        &mut self,
        simd: S,
        line: usize,
        key: usize,
        k: [*const E; K],
        ahead: usize,
    ) {
        let lanes = lanes::<S, T>();
        let mut q = [std::ptr::null(); R];
        for (i, q) in q.iter_mut().enumerate() {
            *q = self.q.row(line + i, self.cols).as_ptr();
        }
        let mut products = [[T::splat(simd, T::ZERO); R]; K];
        for col in (0..self.cols).step_by(lanes) {
            let mut q_vectors = [T::splat(simd, T::ZERO); R];
            for (vector, q) in q_vectors.iter_mut().zip(q) {
                // SAFETY: `q` points to a row of `cols` numbers, and `cols` is whole vectors.
                *vector = unsafe { q.add(col).cast::<T::Vector<S>>().read_unaligned() };
            }
            for (products, k) in products.iter_mut().zip(k) {
                // SAFETY: the caller vouches for `cols` numbers, and `cols` is whole vectors.
                let numbers = unsafe { std::slice::from_raw_parts(k.add(col), lanes) };
                prefetch_line(k.wrapping_add(ahead), col);
                let k = E::widen_vector(simd, numbers);
                for (product, &q) in products.iter_mut().zip(&q_vectors) {
                    *product = T::mul_add(simd, q, k, *product);
                }
            }
        }
        for (j, sums) in sums::<S, T, R, K>(simd, &products).iter().enumerate() {
            self.scores.row_mut(key + j, line + R)[line..].copy_from_slice(sums);
        }
    }
}

/// `out[line] += probs[key][line] * v[key]`, one fused multiply-add after the other in the order of the
/// keys, so it has the same bits whatever the blocking.
struct Values<'a, T> {
    probs: &'a Tile<T>,
    out: &'a mut Tile<T>,
    cols: usize,
    ahead: usize,
}

impl<T: Real> Multiply<T> for Values<'_, T> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn ahead(&self) -> usize {
        self.ahead
    }

    #[inline(always)]
    unsafe fn block<S: Simd, E: Element<Acc = T>, const R: usize, const K: usize>(
        &mut self,
        simd: S,
        line: usize,
        key: usize,
        v: [*const E; K],
        ahead: usize,
    ) {
        let lanes = lanes::<S, T>();
        let mut probs = [[T::splat(simd, T::ZERO); R]; K];
        for (j, probs) in probs.iter_mut().enumerate() {
            let numbers = &self.probs.row(key + j, line + R)[line..];
            for (prob, &number) in probs.iter_mut().zip(numbers) {
                *prob = T::splat(simd, number);
            }
        }
        let mut out = [std::ptr::null_mut(); R];
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.out.row_mut(line + i, self.cols).as_mut_ptr();
        }
        let mut v_vectors = [T::splat(simd, T::ZERO); K];
        for col in (0..self.cols).step_by(lanes) {
            for (vector, v) in v_vectors.iter_mut().zip(v) {
                // SAFETY: the caller vouches for `cols` numbers, and `cols` is whole vectors.
                let numbers = unsafe { std::slice::from_raw_parts(v.add(col), lanes) };
                prefetch_line(v.wrapping_add(ahead), col);
                *vector = E::widen_vector(simd, numbers);
            }
            for (i, out) in out.iter().enumerate() {
                // SAFETY: `out` points to a row of `cols` numbers, and `cols` is whole vectors.
                unsafe {
                    let out = out.add(col).cast::<T::Vector<S>>();
                    let mut sum = out.read_unaligned();
                    for (&v, probs) in v_vectors.iter().zip(&probs) {
                        sum = T::mul_add(simd, probs[i], v, sum);
                    }
                    out.write_unaligned(sum);
                }
            }
        }
    }
}
