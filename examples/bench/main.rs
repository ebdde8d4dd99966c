//! Times the op on a GPU, on random data, and prints milliseconds, TFLOP/s and the share of a matrix
//! product's rate; for decode GB/s of K and V.
//!
//! ```sh
//! cargo run --release --features cuda --example bench
//! cargo run --release --features cuda --example bench -- --rows hd128,gqa --length 8192 --json
//! ```
//!
//! Operations are counted as usual: `4 * batch * num_heads * seqlen_q * seqlen_k * head_dim` forward, half
//! of it where causal, two and a half times that backward. The backward is timed as candle runs it: with the
//! gradient of ones that it begins with, and the zeros that it adds gradients to. Freed memory is kept for the next call:
//! as it is by default, every synchronisation gives it back, and a short backward then waits longer for it than it takes.
//!
//! `--record FILE` adds what was measured to a file, as those in `benches/record` are kept.
//!
//! `--memory` measures, in place of time, the most memory that a forward and backward hold beyond their inputs, gradients
//! and all, for this op and for [`reference`], the formula in plain tensor operations.

#[path = "../common/cli.rs"]
#[expect(
    dead_code,
    reason = "the device is opened with candle's events, as users have it"
)]
mod cli;
#[path = "../common/gpu_memory.rs"]
mod gpu_memory;
#[path = "../common/numbers.rs"]
#[expect(dead_code, reason = "none of the numbers here may be 0")]
mod numbers;
#[path = "../common/out_of_memory.rs"]
mod out_of_memory;
mod rows;

use std::fs::{File, OpenOptions};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_flash_gqa::{AttnOptions, flash_attn_with, reference};
use clap::Parser;
use time::OffsetDateTime;

use cli::DeviceName;
use gpu_memory::GpuMemory;
use numbers::at_least_one;
use out_of_memory::is_out_of_memory;
use rows::{Row, Rows};

#[derive(Parser)]
#[command(about = "Times the attention op on a GPU")]
struct Args {
    /// Sets of rows.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "hd64,hd128,hd256,gqa,decode,tiny"
    )]
    rows: Vec<Rows>,
    /// Only rows with this many keys.
    #[arg(long, value_parser = at_least_one, allow_negative_numbers = true)]
    length: Option<usize>,
    #[arg(long, default_value = "bf16", value_parser = ["bf16", "f16"])]
    dtype: String,
    /// Asks for the same bits of dq on every run.
    #[arg(long)]
    deterministic: bool,
    /// Milliseconds that each figure is measured for, after as long a warm-up.
    #[arg(long, default_value_t = 400)]
    time: u64,
    /// Measures memory in place of time.
    #[arg(long)]
    memory: bool,
    /// cuda[:N].
    #[arg(long, default_value_t = DeviceName::Cuda(0))]
    device: DeviceName,
    /// One JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
    /// Appends the rows to a Markdown file too, below the date, the GPU and the commit.
    #[arg(long, value_name = "FILE", conflicts_with = "memory")]
    record: Option<PathBuf>,
}

/// Median milliseconds of a call: of chunks that are long enough for the clock, each synchronised once.
fn median_ms(device: &Device, time: Duration, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut chunk = |calls: usize| -> Result<f64> {
        let started = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        device.synchronize()?;
        Ok(started.elapsed().as_secs_f64() * 1e3)
    };
    chunk(1)?;
    // Doubled, and not computed from one call: the first ones after a synchronisation cost the allocator more.
    let mut calls = 1;
    while chunk(calls)? < 2. {
        calls *= 2;
    }
    let mut chunks = Vec::new();
    let started = Instant::now();
    while started.elapsed() < 2 * time || chunks.len() < 6 {
        chunks.push(chunk(calls)? / calls as f64);
    }
    // The first half was the warm-up.
    let mut warm = chunks.split_off(chunks.len() / 2);
    warm.sort_by(f64::total_cmp);
    Ok(warm[warm.len() / 2])
}

fn main() -> ExitCode {
    cli::main(|| run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let rows = rows::chosen(&args.rows, args.length)?;
    let device = open(args.device)?;
    let gpu_memory = GpuMemory::of(&device)?.context("the GPU has no memory pool")?;
    let dtype = if args.dtype == "f16" {
        DType::F16
    } else {
        DType::BF16
    };
    if args.memory {
        return memory(&rows, args, &device, dtype, &gpu_memory);
    }
    let duration = Duration::from_millis(args.time);

    let n = 8192;
    let matrix = || Tensor::randn(0f32, 1., (n, n), &device)?.to_dtype(dtype);
    let (a, b) = (matrix()?, matrix()?);
    let ms = median_ms(&device, duration, || Ok(a.matmul(&b).map(drop)?))?;
    let matmul = 2. * (n as f64).powi(3) / ms / 1e9;
    drop((a, b));
    let mut report = Report::new(args, &device, matmul)?;
    for row in rows {
        bench(row, args, &device, dtype, duration, &mut report)
            .with_context(|| format!("{row:?}"))?;
    }
    Ok(())
}

/// With candle's events, unlike the other examples: they are part of what a call costs.
fn open(device: DeviceName) -> Result<Device> {
    match device {
        DeviceName::Cuda(ordinal) => Device::new_cuda(ordinal).context(
            "the bench needs a GPU and the feature `cuda` (cargo run --release --features cuda --example bench)",
        ),
        DeviceName::Cpu => {
            bail!("--device {device}: the bench is of GPUs, expected cuda or cuda:N; on the CPU there is `cargo bench`")
        }
    }
}

fn inputs(row: Row, device: &Device, dtype: DType) -> Result<[Var; 3]> {
    let normal = |seqlen, heads| -> Result<Var> {
        let values = Tensor::randn(0f32, 1., (row.batch, seqlen, heads, row.head_dim), device)?;
        Ok(Var::from_tensor(&values.to_dtype(dtype)?)?)
    };
    Ok([
        normal(row.seqlen_q, row.num_heads)?,
        normal(row.seqlen_k, row.num_kv_heads)?,
        normal(row.seqlen_k, row.num_kv_heads)?,
    ])
}

fn options(row: Row, args: &Args) -> AttnOptions {
    AttnOptions {
        causal: row.causal,
        deterministic: args.deterministic,
        ..AttnOptions::default()
    }
}

/// Prints what a forward and backward of each row hold, in MiB.
fn memory(
    rows: &[Row],
    args: &Args,
    device: &Device,
    dtype: DType,
    memory: &GpuMemory,
) -> Result<()> {
    let mut out = stdout().lock();
    if !args.json {
        let gib = memory.total_bytes()? as f64 / f64::from(1 << 30);
        writeln!(out, "beyond the inputs, on a GPU of {gib:.0} GiB:")?;
    }
    for &row in rows {
        let [q, k, v] = inputs(row, device, dtype)?;
        let options = options(row, args);
        // MiB, or why there are none.
        type Peak = std::result::Result<f64, &'static str>;
        let peak = |attention: &dyn Fn() -> candle_core::Result<Tensor>| -> Result<Peak> {
            memory.give_back()?;
            memory.start_peak()?;
            let inputs = memory.peak_bytes()?;
            let run = || -> Result<()> {
                let gradients = attention()?.backward()?;
                device.synchronize()?;
                drop(gradients);
                Ok(())
            };
            match run() {
                Ok(()) => Ok(Ok(
                    (memory.peak_bytes()? - inputs) as f64 / f64::from(1 << 20)
                )),
                Err(error) if is_out_of_memory(&error) => Ok(Err("out of memory")),
                Err(error) => Err(error),
            }
        };
        let ours = peak(&|| flash_attn_with(&q, &k, &v, &options))?;
        let scores = row.batch * row.num_heads * row.seqlen_q * row.seqlen_k;
        let plain = if u32::try_from(scores).is_ok() {
            peak(&|| reference(&q, &k, &v, &options))?
        } else {
            Err("more scores than candle's kernels count")
        };
        if args.json {
            writeln!(
                out,
                "{}",
                serde_json::json!({
                    "dtype": args.dtype, "batch": row.batch, "seqlen_q": row.seqlen_q,
                    "seqlen_k": row.seqlen_k, "num_heads": row.num_heads,
                    "num_kv_heads": row.num_kv_heads, "head_dim": row.head_dim,
                    "causal": row.causal, "mib": ours.ok(), "plain_mib": plain.ok(),
                })
            )?;
            continue;
        }
        let text = |peak: Peak| match peak {
            Ok(mib) => format!("{mib:.0} MiB"),
            Err(reason) => reason.to_string(),
        };
        writeln!(
            out,
            "head_dim {}, {}/{} heads, {} x {}: {}, plain {}",
            row.head_dim,
            row.num_heads,
            row.num_kv_heads,
            row.batch,
            row.seqlen_k,
            text(ours),
            text(plain)
        )?;
    }
    Ok(())
}

fn bench(
    row: Row,
    args: &Args,
    device: &Device,
    dtype: DType,
    duration: Duration,
    report: &mut Report,
) -> Result<()> {
    let [q, k, v] = inputs(row, device, dtype)?;
    let options = options(row, args);
    let constants = [
        q.as_detached_tensor(),
        k.as_detached_tensor(),
        v.as_detached_tensor(),
    ];
    let [cq, ck, cv] = &constants;
    let ms = median_ms(device, duration, || {
        Ok(flash_attn_with(cq, ck, cv, &options).map(drop)?)
    })?;
    report.row(row, "fwd", ms, row.operations())?;
    if row.backward {
        let out = flash_attn_with(&q, &k, &v, &options)?;
        let ms = median_ms(device, duration, || Ok(out.backward().map(drop)?))?;
        report.row(row, "bwd", ms, 2.5 * row.operations())?;
    }
    if row.is_tiny() {
        let [cq, ck] = [cq, ck].map(|x| x.transpose(1, 2)?.contiguous());
        let (cq, ck) = (cq?, ck?.t()?);
        let ms = median_ms(device, duration, || Ok(cq.matmul(&ck).map(drop)?))?;
        report.tiny_product(ms)?;
    }
    ensure!(device.synchronize().is_ok(), "the device failed");
    Ok(())
}

/// Where the figures go: a table or JSON lines, and a record.
struct Report<'a> {
    args: &'a Args,
    /// TFLOP/s of a large matrix product.
    matmul: f64,
    record: Option<File>,
}

impl<'a> Report<'a> {
    /// Prints the heading, and begins a section of the record.
    fn new(args: &'a Args, device: &Device, matmul: f64) -> Result<Self> {
        let record = match &args.record {
            Some(path) => Some(begin_record(path, args, device, matmul)?),
            None => None,
        };
        if args.json {
            writeln!(
                stdout(),
                "{}",
                serde_json::json!({"matmul_tflops": matmul, "dtype": args.dtype})
            )?;
        } else {
            writeln!(
                stdout(),
                "{} matrix product of 8192^3: {matmul:.0} TFLOP/s",
                args.dtype
            )?;
            writeln!(
                stdout(),
                "{:4} {:>8} {:>6} {:>14} {:6} {:>9} {:>8} {:>6}",
                "pass",
                "head_dim",
                "heads",
                "batch x keys",
                "mask",
                "ms",
                "TFLOP/s",
                "share"
            )?;
        }
        Ok(Self {
            args,
            matmul,
            record,
        })
    }

    fn row(&mut self, row: Row, pass: &str, ms: f64, operations: f64) -> Result<()> {
        let args = self.args;
        let tflops = operations / ms / 1e9;
        let share = tflops / self.matmul;
        let gbs = row.kv_bytes() / ms / 1e6;
        let is_decode = row.seqlen_q == 1;
        let head_dim = row.head_dim;
        let heads = format!("{}/{}", row.num_heads, row.num_kv_heads);
        let size = format!("{} x {}", row.batch, row.seqlen_k);
        let mask = match (is_decode, row.causal) {
            (true, _) => "decode",
            (false, true) => "causal",
            (false, false) => "full",
        };
        if let Some(record) = &mut self.record {
            let gbs = if is_decode {
                format!("{gbs:.0}")
            } else {
                String::new()
            };
            writeln!(
                record,
                "| {pass} | {head_dim} | {heads} | {size} | {mask} | {ms:.4} | {tflops:.1} | {share:.2} | {gbs} |"
            )?;
        }
        if args.json {
            let mut line = serde_json::json!({
                "pass": pass, "dtype": args.dtype, "batch": row.batch, "seqlen_q": row.seqlen_q,
                "seqlen_k": row.seqlen_k, "num_heads": row.num_heads, "num_kv_heads": row.num_kv_heads,
                "head_dim": head_dim, "causal": row.causal, "deterministic": args.deterministic,
                "ms": ms, "tflops": tflops, "share_of_matmul": share,
            });
            if is_decode {
                line["gbs"] = gbs.into();
            }
            writeln!(stdout(), "{line}")?;
        } else if is_decode {
            writeln!(
                stdout(),
                "{pass:4} {head_dim:>8} {heads:>6} {size:>14} {mask} {ms:>9.4} {gbs:>7.0} GB/s"
            )?;
        } else {
            writeln!(
                stdout(),
                "{pass:4} {head_dim:>8} {heads:>6} {size:>14} {mask:6} {ms:>9.4} {tflops:>8.1} {share:>6.2}"
            )?;
        }
        Ok(())
    }

    /// What a call costs at least: candle's product of the tiny row's q and k.
    fn tiny_product(&mut self, ms: f64) -> Result<()> {
        if let Some(record) = &mut self.record {
            writeln!(
                record,
                "| q·k, candle's matmul | 64 | 8/8 | 1 x 16 | full | {ms:.4} | | | |"
            )?;
        }
        if self.args.json {
            writeln!(stdout(), "{}", serde_json::json!({"tiny_matmul_ms": ms}))?;
        } else {
            writeln!(stdout(), "{:4} {:>38} {ms:>9.4}", "q·k", "candle's matmul")?;
        }
        Ok(())
    }
}

/// What a reader has to know of the figures, and the head of their table.
fn begin_record(path: &Path, args: &Args, device: &Device, matmul: f64) -> Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| path.display().to_string())?;
    let commit = Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string());
    let kernels = std::env::var("CANDLE_FLASH_GQA_KERNELS").unwrap_or_default();
    writeln!(
        file,
        "## examples/bench, {}\n\n{}, {} on random data, candle-flash-gqa {} at commit {}, kernels {}{}; medians over {} ms, warm. \
         A matrix product of 8192^3 reaches {matmul:.0} TFLOP/s.\n\n\
         | pass | head_dim | heads q/kv | batch x keys | mask | ms | TFLOP/s | share of the product | GB/s of K and V |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        OffsetDateTime::now_utc().date(),
        gpu_name(device)?,
        args.dtype,
        env!("CARGO_PKG_VERSION"),
        commit.as_deref().unwrap_or("unknown"),
        if kernels.is_empty() {
            "as chosen"
        } else {
            &kernels
        },
        if args.deterministic {
            ", deterministic"
        } else {
            ""
        },
        args.time,
    )?;
    Ok(file)
}

fn gpu_name(device: &Device) -> Result<String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => Ok(device.cuda_stream().context().name()?),
        other => anyhow::bail!("expected a CUDA device, got {:?}", other.location()),
    }
}
