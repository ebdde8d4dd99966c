//! The record of a run: one row for each step, as CSV and as rows to plot.

use std::fmt::Write;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};

use crate::trainer::Step;

const HEADER: &str = "step,loss,learning_rate,gradient_norm,tokens_per_second,held_out_loss";

/// One step; the held-out loss is only there where it was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub step: Step,
    pub tokens_per_second: f64,
    pub held_out_loss: Option<f32>,
}

pub fn to_csv(rows: &[Row]) -> String {
    let mut csv = format!("{HEADER}\n");
    for row in rows {
        let Step {
            step,
            loss,
            learning_rate,
            gradient_norm,
        } = row.step;
        let held_out = row
            .held_out_loss
            .map_or(String::new(), |loss| loss.to_string());
        writeln!(
            csv,
            "{step},{loss},{learning_rate},{gradient_norm},{:.1},{held_out}",
            row.tokens_per_second
        )
        .expect("a String takes any text");
    }
    csv
}

pub fn from_csv(csv: &str) -> Result<Vec<Row>> {
    let mut lines = csv.lines();
    ensure!(
        lines.next() == Some(HEADER),
        "the first line is not {HEADER}"
    );
    lines
        .map(|line| row(line).with_context(|| format!("cannot read the row {line:?}")))
        .collect()
}

fn row(line: &str) -> Option<Row> {
    fn next<T: FromStr>(fields: &mut std::str::Split<char>) -> Option<T> {
        fields.next()?.parse().ok()
    }
    let mut fields = line.split(',');
    Some(Row {
        step: Step {
            step: next(&mut fields)?,
            loss: next(&mut fields)?,
            learning_rate: next(&mut fields)?,
            gradient_norm: next(&mut fields)?,
        },
        tokens_per_second: next(&mut fields)?,
        held_out_loss: next(&mut fields),
    })
}
