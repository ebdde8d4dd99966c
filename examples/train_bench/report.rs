//! Rows and profiles as tables or JSON.

use std::io::{Write, stdout};

use anyhow::Result;
use serde_json::json;

use crate::Args;
use crate::bench::Row;
use crate::profile::Profile;
use crate::shapes::{Case, OPERATIONS, Rates};

pub struct Report {
    json: bool,
    recompute: bool,
    /// TFLOP/s that the share is of.
    peak: Option<f64>,
}

impl Report {
    pub fn new(args: &Args) -> Self {
        Self {
            json: args.json,
            recompute: args.recompute,
            peak: args.peak,
        }
    }

    /// The head of the table of rows.
    pub fn header(&self) -> Result<()> {
        if !self.json {
            writeln!(stdout(), "{OPERATIONS}")?;
            writeln!(
                stdout(),
                "{:13} {:9} {:>7} {:>11} {:>9} {:>9} {:>8} {:>6} {:>9} {:>7}",
                "model",
                "attention",
                "context",
                "batch",
                "s/step",
                "tokens/s",
                "TFLOP/s",
                "share",
                "peak GiB",
                "loss"
            )?;
        }
        Ok(())
    }

    pub fn row(&self, row: &Row) -> Result<()> {
        Ok(writeln!(stdout(), "{}", self.line(row))?)
    }

    /// A row of the table, or its JSON.
    pub fn line(&self, row: &Row) -> String {
        let Case {
            shape,
            attention,
            seqlen,
        } = row.case;
        let Some(figures) = &row.figures else {
            return self.out_of_memory(row.case);
        };
        let Rates {
            tokens_per_second,
            tflops,
        } = figures.rates;
        let share = self.peak.map(|peak| tflops / peak);
        let gib = figures
            .peak_bytes
            .map(|bytes| bytes as f64 / (1u64 << 30) as f64);
        if self.json {
            let mut line = json!({
                "model": shape.to_string(),
                "attention": attention.to_string(),
                "seqlen": seqlen,
                "recompute": self.recompute,
                "batch": figures.batch,
                "micro_batches": figures.micro_batches,
                "seconds_per_step": figures.seconds_per_step,
                "tokens_per_second": tokens_per_second,
                "tflops": tflops,
                "share_of_peak": share,
                "peak_gib": gib,
                "loss": figures.loss,
            });
            if row.at_least {
                line["at_least"] = json!(true);
            }
            return line.to_string();
        }
        let batch = format!("{} x {}", figures.micro_batches, figures.batch);
        let share = share.map_or("-".to_string(), |share| format!("{share:.3}"));
        let gib = gib.map_or("-".to_string(), |gib| format!("{gib:.1}"));
        let note = match row.at_least {
            true => "  and more: the search ended there",
            false => "",
        };
        format!(
            "{shape:13} {attention:9} {seqlen:7} {batch:>11} {:9.3} {tokens_per_second:9.0} {tflops:8.1} {share:>6} {gib:>9} {:7.3}{note}",
            figures.seconds_per_step, figures.loss
        )
    }

    fn out_of_memory(&self, case: Case) -> String {
        let Case {
            shape,
            attention,
            seqlen,
        } = case;
        let (model, attention) = (shape.to_string(), attention.to_string());
        match self.json {
            true => json!({"model": model, "attention": attention, "seqlen": seqlen, "recompute": self.recompute, "out_of_memory": true})
                .to_string(),
            false => format!("{model:13} {attention:9} {seqlen:7} out of memory"),
        }
    }

    /// Milliseconds; a part's are those of all of its kind in the model.
    pub fn profile(&self, case: Case, profile: Option<&Profile>) -> Result<()> {
        let Some(Profile {
            batch,
            phases,
            parts,
        }) = profile
        else {
            return Ok(writeln!(stdout(), "{}", self.out_of_memory(case))?);
        };
        let mut out = stdout().lock();
        let Case {
            shape,
            attention,
            seqlen,
        } = case;
        if self.json {
            let phases: serde_json::Map<_, _> = phases
                .iter()
                .map(|(name, ms)| (name.to_string(), json!(ms)))
                .collect();
            let parts: Vec<_> = parts
                .iter()
                .map(|part| {
                    json!({"part": part.name, "count": part.count, "forward_ms": part.forward, "backward_ms": part.backward})
                })
                .collect();
            let line = json!({
                "model": shape.to_string(),
                "attention": attention.to_string(),
                "seqlen": seqlen,
                "batch": batch,
                "phases_ms": phases,
                "parts": parts,
            });
            return Ok(writeln!(out, "{line}")?);
        }
        writeln!(
            out,
            "{shape}, {attention} attention, {batch} x {seqlen} tokens"
        )?;
        for (name, ms) in phases {
            writeln!(out, "  {name:20} {ms:9.2} ms")?;
        }
        writeln!(
            out,
            "  {:20} {:>5} {:>9} {:>9} ms in all",
            "part", "count", "forward", "backward"
        )?;
        let mut sums = [0.; 2];
        for part in parts {
            let all = [part.forward, part.backward].map(|ms| ms * part.count as f64);
            writeln!(
                out,
                "  {:20} {:5} {:9.2} {:9.2}",
                part.name, part.count, all[0], all[1]
            )?;
            sums = [sums[0] + all[0], sums[1] + all[1]];
        }
        Ok(writeln!(
            out,
            "  {:20} {:>5} {:9.2} {:9.2}",
            "sum of parts", "", sums[0], sums[1]
        )?)
    }
}
