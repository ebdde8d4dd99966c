//! Attention on the CPU against its peers, on the same inputs in one run.
//!
//! ```text
//! cargo bench --bench attention                    every row
//! cargo bench --bench attention -- 'prefill.*f32'  some of them
//! ```
//!
//! For each row: this crate (`flash`), candle's plain attention as in candle-transformers' Llama
//! (`plain`: repeat_kv, matmul, scale, mask, softmax, matmul) and `candle_nn::attention::flash_attn`
//! (`candle_nn`). Throughput is in operations: 4 * batch * num_heads * seqlen_q * seqlen_k * head_dim,
//! half when causal with more than one query row, two and a half times that for the backward; for decode
//! it is in bytes of K and V. `ceiling` holds what the machine can do: candle's own matrix product, and
//! reading memory once.
//!
//! The backward is timed as a user runs it, `loss.backward()` with the loss a sum; that includes what
//! candle does around the op (zeros and an addition for each gradient).

use std::time::Duration;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_flash_gqa::flash_attn;
use candle_nn::attention::AttnMask;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};

/// One problem of the tables.
struct Row {
    name: &'static str,
    batch: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    causal: bool,
}

const fn row(
    name: &'static str,
    [batch, seqlen_q, seqlen_k]: [usize; 3],
    [num_heads, num_kv_heads, head_dim]: [usize; 3],
    causal: bool,
) -> Row {
    Row {
        name,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        causal,
    }
}

const FORWARD: &[Row] = &[
    row("prefill-256-32/8-d128", [1, 256, 256], [32, 8, 128], true),
    row("prefill-512-32/8-d128", [1, 512, 512], [32, 8, 128], true),
    row(
        "prefill-1024-32/8-d128",
        [1, 1024, 1024],
        [32, 8, 128],
        true,
    ),
    row(
        "prefill-4096-32/8-d128",
        [1, 4096, 4096],
        [32, 8, 128],
        true,
    ),
    row("prefill-1024-9/3-d64", [1, 1024, 1024], [9, 3, 64], true),
    row("prefill-4096-9/3-d64", [1, 4096, 4096], [9, 3, 64], true),
    row("full-2048-8/8-d64", [1, 2048, 2048], [8, 8, 64], false),
    row("batch4-512-8/2-d64", [4, 512, 512], [8, 2, 64], true),
    row("decode-8192-32/8-d128", [1, 1, 8192], [32, 8, 128], true),
];

const BACKWARD: &[Row] = &[
    row("backward-512-8/2-d64", [1, 512, 512], [8, 2, 64], true),
    row("backward-2048-8/2-d64", [1, 2048, 2048], [8, 2, 64], true),
];

const DTYPES: [(DType, &str); 3] = [
    (DType::F32, "f32"),
    (DType::BF16, "bf16"),
    (DType::F16, "f16"),
];

impl Row {
    fn tensors(&self, dtype: DType) -> Result<[Tensor; 3]> {
        let normal = |seqlen, heads| {
            Tensor::randn(
                0f32,
                1.,
                (self.batch, seqlen, heads, self.head_dim),
                &Device::Cpu,
            )?
            .to_dtype(dtype)
        };
        Ok([
            normal(self.seqlen_q, self.num_heads)?,
            normal(self.seqlen_k, self.num_kv_heads)?,
            normal(self.seqlen_k, self.num_kv_heads)?,
        ])
    }

    fn softmax_scale(&self) -> f32 {
        1. / (self.head_dim as f32).sqrt()
    }

    fn forward_operations(&self) -> u64 {
        let full = 4 * self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * self.head_dim;
        (if self.causal && self.seqlen_q > 1 {
            full / 2
        } else {
            full
        }) as u64
    }

    fn throughput(&self, dtype: DType) -> Throughput {
        if self.seqlen_q == 1 {
            let numbers = 2 * self.batch * self.seqlen_k * self.num_kv_heads * self.head_dim;
            Throughput::Bytes((numbers * dtype.size_in_bytes()) as u64)
        } else {
            Throughput::Elements(self.forward_operations())
        }
    }

    /// 1 where a key is hidden; candle-transformers makes it once for a model, so it is not timed.
    fn hidden(&self) -> Result<Tensor> {
        let offset = self.seqlen_k - self.seqlen_q;
        let hidden: Vec<u8> = (0..self.seqlen_q)
            .flat_map(|i| (0..self.seqlen_k).map(move |j| u8::from(j > i + offset)))
            .collect();
        Tensor::from_vec(hidden, (self.seqlen_q, self.seqlen_k), &Device::Cpu)
    }

    /// Attention in plain operations; `q`, `k`, `v` are `(batch, heads, seqlen, head_dim)`.
    fn plain(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        hidden: &Tensor,
        softmax: fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let repeat = |x: &Tensor| {
            candle_transformers::utils::repeat_kv(x.clone(), self.num_heads / self.num_kv_heads)?
                .contiguous()
        };
        let (k, v) = (repeat(k)?, repeat(v)?);
        let scores = (q.matmul(&k.t()?)? / f64::from(self.head_dim as u32).sqrt())?;
        let scores = if self.causal && self.seqlen_q > 1 {
            let minus_infinity = Tensor::new(f32::NEG_INFINITY, &Device::Cpu)?
                .to_dtype(scores.dtype())?
                .broadcast_as(scores.shape())?;
            hidden
                .broadcast_as(scores.shape())?
                .where_cond(&minus_infinity, &scores)?
        } else {
            scores
        };
        softmax(&scores)?.matmul(&v)
    }
}

fn heads_first(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()
}

fn is_plain_worth_it(row: &Row, dtype: DType) -> bool {
    // Half types take candle's plain and flash attention seconds to minutes a call.
    dtype == DType::F32 || row.seqlen_q == 1
}

fn settings(group: &mut BenchmarkGroup<'_, WallTime>, slow: bool) {
    group
        .warm_up_time(Duration::from_millis(500))
        .sample_size(10)
        .measurement_time(Duration::from_secs(if slow { 3 } else { 2 }));
}

fn ceiling(criterion: &mut Criterion) -> Result<()> {
    let mut group = criterion.benchmark_group("ceiling");
    settings(&mut group, false);
    let matrix = || Tensor::randn(0f32, 1., (1024, 1024), &Device::Cpu);
    let (a, b) = (matrix()?, matrix()?);
    group.throughput(Throughput::Elements(2 * 1024 * 1024 * 1024));
    group.bench_function("matmul-1024-f32", |bencher| bencher.iter(|| a.matmul(&b)));

    // As much as K and V of the decode row in f32.
    let memory = vec![1f32; 16 << 20];
    group.throughput(Throughput::Bytes(size_of_val(&memory[..]) as u64));
    group.bench_function("read-64MiB", |bencher| bencher.iter(|| read(&memory)));
    group.finish();
    Ok(())
}

/// Reads a slice once, on all cores.
fn read(memory: &[f32]) -> f32 {
    use rayon::prelude::*;
    const SUMS: usize = 64;
    memory
        .par_chunks(1 << 20)
        .map(|chunk| {
            let mut sums = [0f32; SUMS];
            for numbers in chunk.chunks_exact(SUMS) {
                for (sum, number) in sums.iter_mut().zip(numbers) {
                    *sum += number;
                }
            }
            sums.iter().sum::<f32>()
        })
        .sum()
}

fn forward(criterion: &mut Criterion) -> Result<()> {
    for row in FORWARD {
        for (dtype, dtype_name) in DTYPES {
            let mut group = criterion.benchmark_group(format!("{}-{dtype_name}", row.name));
            settings(&mut group, row.seqlen_q >= 4096);
            group.throughput(row.throughput(dtype));
            let [q, k, v] = row.tensors(dtype)?;
            group.bench_function("flash", |bencher| {
                bencher.iter(|| flash_attn(&q, &k, &v, row.softmax_scale(), row.causal))
            });
            if !is_plain_worth_it(row, dtype) {
                continue;
            }
            let hidden = row.hidden()?;
            let [plain_q, plain_k, plain_v] =
                [heads_first(&q)?, heads_first(&k)?, heads_first(&v)?];
            group.bench_function("plain", |bencher| {
                bencher.iter(|| {
                    let softmax = candle_nn::ops::softmax_last_dim;
                    row.plain(&plain_q, &plain_k, &plain_v, &hidden, softmax)
                })
            });
            group.bench_function("candle_nn", |bencher| {
                bencher.iter(|| {
                    let mask = if row.causal {
                        AttnMask::causal_with_offset(row.seqlen_k - row.seqlen_q)
                    } else {
                        AttnMask::None
                    };
                    let scale = row.softmax_scale();
                    match dtype {
                        DType::F32 => candle_nn::attention::flash_attn::<f32>(
                            &q, &k, &v, scale, mask, None, None,
                        ),
                        DType::BF16 => candle_nn::attention::flash_attn::<half::bf16>(
                            &q, &k, &v, scale, mask, None, None,
                        ),
                        _ => candle_nn::attention::flash_attn::<half::f16>(
                            &q, &k, &v, scale, mask, None, None,
                        ),
                    }
                })
            });
            group.finish();
        }
    }
    Ok(())
}

fn backward(criterion: &mut Criterion) -> Result<()> {
    for row in BACKWARD {
        for (dtype, dtype_name) in DTYPES {
            let mut group = criterion.benchmark_group(format!("{}-{dtype_name}", row.name));
            settings(&mut group, false);
            group.throughput(Throughput::Elements(row.forward_operations() * 5 / 2));
            let [q, k, v] = row.tensors(dtype)?;
            let [q, k, v] = [
                Var::from_tensor(&q)?,
                Var::from_tensor(&k)?,
                Var::from_tensor(&v)?,
            ];
            let loss = flash_attn(&q, &k, &v, row.softmax_scale(), row.causal)?.sum_all()?;
            group.bench_function("flash", |bencher| bencher.iter(|| loss.backward()));
            if !is_plain_worth_it(row, dtype) {
                continue;
            }
            let hidden = row.hidden()?;
            let [q, k, v] = [heads_first(&q)?, heads_first(&k)?, heads_first(&v)?];
            let [q, k, v] = [
                Var::from_tensor(&q)?,
                Var::from_tensor(&k)?,
                Var::from_tensor(&v)?,
            ];
            // softmax_last_dim has no backward.
            let softmax = |scores: &Tensor| candle_nn::ops::softmax(scores, D::Minus1);
            let loss = row.plain(&q, &k, &v, &hidden, softmax)?.sum_all()?;
            group.bench_function("plain", |bencher| bencher.iter(|| loss.backward()));
            group.finish();
        }
    }
    Ok(())
}

fn benches(criterion: &mut Criterion) {
    for run in [ceiling, forward, backward] {
        run(criterion).expect("tensors of the benchmark");
    }
}

criterion_group!(attention, benches);
criterion_main!(attention);
