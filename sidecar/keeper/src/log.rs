//! Logs: one JSON object a line on standard error, with the names that the other processes use. By hand, because what writes
//! theirs would be larger than the keeper.

use std::fmt;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// What it does.
    Info,
    /// It goes on, though something was not as it should be.
    Warn,
    /// A human must look.
    Error,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::Warn => "WARN",
            Self::Error => "ERROR",
        }
    }
}

/// Writes one line.
pub fn write(level: Level, message: &str, fields: &[(&str, &dyn fmt::Display)]) {
    let mut line = line(SystemTime::now(), level, message, fields);
    line.push('\n');
    // One call, so that lines of two threads do not mix. Where it fails, nobody could be told.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

fn line(
    now: SystemTime,
    level: Level,
    message: &str,
    fields: &[(&str, &dyn fmt::Display)],
) -> String {
    let own = fields.iter().map(|(name, value)| ((*name).to_owned(), json!(value.to_string())));
    let mut all: Map<String, Value> = own.collect();
    all.insert("message".to_owned(), json!(message));
    let (timestamp, level) = (timestamp(now), level.name());
    json!({"timestamp": timestamp, "level": level, "fields": all, "target": "keeper"}).to_string()
}

/// As RFC 3339 has it, in UTC, with microseconds.
fn timestamp(now: SystemTime) -> String {
    let since: Duration = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, micros) = (since.as_secs(), since.subsec_micros());
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of a day since 1970. A year is counted from March, so that the odd day is its last.
const fn date(days: u64) -> (u64, u64, u64) {
    // From the 1st of March of year 0; 146097 days are 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + if month <= 2 { 1 } else { 0 };
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_right_at_the_ends_of_years_and_of_february() {
        let expected = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_709_210_096, "2024-02-29T12:34:56.000000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ];
        for (seconds, text) in expected {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_line_has_the_form_of_the_other_processes_logs() {
        let said = "two\nlines and a \"quote\"";
        let line = line(UNIX_EPOCH, Level::Warn, "accept", &[("error", &said)]);
        assert!(!line.contains('\n'), "{line}");
        let expected = json!({
            "timestamp": "1970-01-01T00:00:00.000000Z",
            "level": "WARN",
            "fields": {"message": "accept", "error": said},
            "target": "keeper",
        });
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), expected);
    }
}
