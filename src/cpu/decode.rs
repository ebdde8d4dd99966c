//! The forward pass for a handful of query rows: decoding on a long cache, bound by reading K and V.
//!
//! With so few rows a tile's vectors would be mostly empty, so here scores are rows by keys: each is a
//! dot product along head_dim, and every row of K and V is read once for all the heads of its group.

use pulp::Simd;

use super::buffer::{Tile, padded};
use super::element::Element;
use super::forward::{Attend, Scratch, rescale_rows};
use super::matmul::{Begin, Lhs, Out, Rhs, product};
use super::rows::Scaling;
use super::simd::{Real, lanes, tanh};

/// Rows up to which this kernel is used: above, a tile fills half a vector of 16.
pub(crate) const MAX_ROWS: usize = 8;

#[inline(always)]
pub(crate) fn attend<S: Simd, E: Element>(simd: S, attend: Attend<'_, E>) {
    let Attend {
        params,
        q,
        k,
        v,
        tile,
        keys,
        max_keys,
        scratch,
        ..
    } = attend;
    let head_dim = params.head_dim;
    let cols = padded::<E::Acc>(head_dim);
    let rows = tile.rows();
    let scaling = Scaling::<E::Acc>::new(params);
    for row in 0..rows {
        let (position, head) = tile.row(row);
        let line = scratch.q.row_mut(row, head_dim);
        q.load(tile.batch, position, head, line);
        for x in line {
            *x = *x * scaling.q;
        }
    }

    let mut first_key = keys.start;
    while first_key < keys.end {
        let keys = first_key..(first_key + max_keys).min(keys.end);
        k.load_tile(tile.batch, keys.clone(), tile.kv_head, &mut scratch.k);
        for key in 0..keys.len() {
            dot_products::<S, E::Acc>(simd, key, rows, cols, scratch);
        }
        if let Some(slopes) = &params.alibi_slopes {
            scratch.alibi.set(params, slopes, tile, keys.start);
        }
        let mut all_rows_see_all = true;
        for row in 0..rows {
            let visible = params.mask.keys_of_row(tile.row(row).0);
            let start = visible.start.clamp(keys.start, keys.end) - keys.start;
            let end = visible.end.clamp(keys.start, keys.end) - keys.start;
            all_rows_see_all &= (start..end) == (0..keys.len());
            let scores = scratch.scores.row_mut(row, padded::<E::Acc>(keys.len()));
            if let Some(factor) = scaling.softcap {
                let factor = E::Acc::splat(simd, factor);
                for vector in E::Acc::as_vectors_mut::<S>(scores).0 {
                    *vector = E::Acc::vmul(simd, factor, tanh::<S, E::Acc>(simd, *vector));
                }
            }
            if params.alibi_slopes.is_some() {
                let (slope, aligned) =
                    (scratch.alibi.neg_slope[row], scratch.alibi.aligned_key[row]);
                for (key, score) in scores[..keys.len()].iter_mut().enumerate() {
                    let distance = (aligned.to_f64() - key as f64).abs();
                    *score = E::Acc::from_f64(score.to_f64() + slope.to_f64() * distance);
                }
            }
            scores[..start].fill(E::Acc::NEG_INFINITY);
            scores[end.max(start)..].fill(E::Acc::NEG_INFINITY);
            scratch.softmax.update_row(simd, row, scores);
        }
        rescale_rows(&scratch.softmax.rescale, rows, cols, &mut scratch.out);

        v.load_tile(tile.batch, keys.clone(), tile.kv_head, &mut scratch.v);
        let block = if all_rows_see_all { rows } else { 1 };
        let (scores_stride, v_stride, out_stride) = (
            scratch.scores.stride(),
            scratch.v.stride(),
            scratch.out.stride(),
        );
        for first in (0..rows).step_by(block) {
            // With more than one row in the block all of them see the whole tile.
            let visible = params.mask.keys_of_row(tile.row(first).0);
            let start = visible.start.clamp(keys.start, keys.end) - keys.start;
            let end = visible.end.clamp(keys.start, keys.end) - keys.start;
            product(
                simd,
                block.min(rows - first),
                cols,
                start..end.max(start),
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
                    data: &mut scratch.out.data_mut()[first * out_stride..],
                    row_stride: out_stride,
                },
                Begin::Add,
            );
        }
        first_key = keys.end;
    }
}

/// `scores[row][key] = q[row] · k[key]` for all rows.
#[inline(always)]
fn dot_products<S: Simd, T: Real>(
    simd: S,
    key: usize,
    rows: usize,
    cols: usize,
    scratch: &mut Scratch<T>,
) {
    let Scratch { q, k, scores, .. } = scratch;
    let mut row = 0;
    while row + 4 <= rows {
        dot_rows::<S, T, 4>(simd, q, k.row(key, cols), row, key, cols, scores);
        row += 4;
    }
    while row < rows {
        dot_rows::<S, T, 1>(simd, q, k.row(key, cols), row, key, cols, scores);
        row += 1;
    }
}

#[inline(always)]
fn dot_rows<S: Simd, T: Real, const ROWS: usize>(
    simd: S,
    q: &Tile<T>,
    k_row: &[T],
    first_row: usize,
    key: usize,
    cols: usize,
    scores: &mut Tile<T>,
) {
    debug_assert_eq!(cols % lanes::<S, T>(), 0);
    let q_rows: [&[T::Vector<S>]; ROWS] =
        std::array::from_fn(|i| T::as_vectors::<S>(q.row(first_row + i, cols)).0);
    let mut sums = [T::splat(simd, T::ZERO); ROWS];
    for (j, &k) in T::as_vectors::<S>(k_row).0.iter().enumerate() {
        for (sum, q) in sums.iter_mut().zip(q_rows) {
            *sum = T::mul_add(simd, q[j], k, *sum);
        }
    }
    let stride = scores.stride();
    for (i, &sum) in sums.iter().enumerate() {
        scores.data_mut()[(first_row + i) * stride + key] = T::reduce_sum(simd, sum);
    }
}
