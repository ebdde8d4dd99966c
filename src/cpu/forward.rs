//! The forward pass: out and the softmax statistics (FlashAttention-2, Algorithm 1).
//!
//! A work item is a tile of query rows, all heads of a group together, and all keys that they see
//! ([`forward_tile`](super::forward_tile)); or, with a handful of rows on a long cache, the rows of all
//! heads ([`decode`]).
//!
//! Where that makes few items, the keys are split as well, by a rule that looks at the shape only; the
//! parts are put together in order, so the result does not depend on the threads.

use candle_core::Result;

use super::decode;
use super::element::Element;
use super::forward_tile::{Attend, Scratch};
use super::parts::{Partial, combine, finish_row};
use super::rows::{RowTile, RowTiling, View};
use super::simd::{Real, arch};
use super::{SharedSlice, for_each_item, multiply_adds, zeros};
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
) -> Result<(Vec<E>, Vec<E::Acc>)> {
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
    let mut out: Vec<E> = zeros("out", stats_len * head_dim)?;
    let mut stats: Vec<E::Acc> = zeros("the statistics", 2 * stats_len)?;
    stats.fill(E::Acc::NEG_INFINITY);
    if stats_len == 0 || seqlen_k == 0 {
        return Ok((out, stats));
    }

    let (tile_m, tile_n) = tile_sizes::<E::Acc>(head_dim);
    let tiling = RowTiling::new(params, tile_m);
    // The few-row kernel sums scores in another order than the backward does.
    let few_rows = !for_backward && tiling.tile_m() <= decode::MAX_ROWS;
    let tile_n = if few_rows { decode::TILE_KEYS } else { tile_n };
    // The few-row kernel takes neighbouring heads together, which lie side by side in K and V, on the
    // same pages: all of a sequence, unless its keys are too few to make enough parts.
    let tiles_of_sequence = if few_rows { num_kv_heads } else { 1 };
    let sequences = batch * num_kv_heads * tiling.head_blocks * tiling.m_tiles / tiles_of_sequence;
    let parts = MIN_ITEMS
        .div_ceil(sequences)
        .min(seqlen_k / min_keys_of_part(few_rows))
        .max(1);
    let tiles_of_item =
        tiles_of_sequence.div_ceil(MIN_ITEMS.div_ceil(sequences * parts).min(tiles_of_sequence));
    let items_of_sequence = tiles_of_sequence.div_ceil(tiles_of_item);

    let mut partial =
        Partial::<E::Acc>::new(if parts > 1 { parts * stats_len } else { 0 }, head_dim)?;
    let shared_out = SharedSlice::new(&mut out);
    let shared_stats = SharedSlice::new(&mut stats);
    let shared_partial = partial.share();

    for_each_item(
        sequences * items_of_sequence * parts,
        multiply_adds(stats_len, seqlen_k, head_dim, 2),
        || {
            let rows = tiling.tile_m();
            Scratch::<E::Acc>::new(head_dim, rows, tile_n, few_rows.then_some(tiles_of_item))
        },
        |scratch, item| {
            let (item, part) = (item / parts, item % parts);
            let (sequence, first) = (item / items_of_sequence, item % items_of_sequence);
            let first = first * tiles_of_item;
            let tiles: Vec<RowTile> = (first..(first + tiles_of_item).min(tiles_of_sequence))
                .map(|tile| tiling.longest_first(batch, sequence * tiles_of_sequence + tile))
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
                tile_n,
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
                                !params.mask.keys_of_row(position).is_empty(),
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
    Ok((out, stats))
}
