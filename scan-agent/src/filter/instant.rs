//! Dates and timestamps as a filter writes them.

/// Nanoseconds since 1970 of `YYYY-MM-DD`, optionally followed by `T` or a space and
/// `HH:MM[:SS[.fraction]]` and `Z`. No other zones: what is stored has none or is UTC.
pub(crate) fn parse_instant(text: &str) -> Option<i128> {
    let text = text.trim();
    let text = text.strip_suffix(['Z', 'z']).unwrap_or(text);
    let (date, time) = match text.split_once(['T', 't', ' ']) {
        Some((date, time)) => (date, time),
        None => (text, "00:00"),
    };
    let mut parts = date.splitn(3, '-').map(|part| digits(part, 1..=4));
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let days = days_from_civil(year, month, day)?;
    Some(i128::from(days) * 86_400_000_000_000 + nanos_of_day(time)?)
}

fn nanos_of_day(time: &str) -> Option<i128> {
    let mut parts = time.splitn(3, ':');
    let hour = digits(parts.next()?, 2..=2).filter(|&hour| hour < 24)?;
    let minute = digits(parts.next()?, 2..=2).filter(|&minute| minute < 60)?;
    let (second, fraction) = match parts.next() {
        None => (0, 0),
        Some(rest) => {
            let (second, fraction) = rest.split_once('.').unwrap_or((rest, "0"));
            let nanos = digits(fraction, 1..=9)?;
            let scale = u32::try_from(9 - fraction.len()).ok()?;
            (digits(second, 2..=2).filter(|&second| second < 60)?, nanos * 10_i64.pow(scale))
        }
    };
    let seconds = hour * 3600 + minute * 60 + second;
    Some(i128::from(seconds) * 1_000_000_000 + i128::from(fraction))
}

fn digits(text: &str, length: std::ops::RangeInclusive<usize>) -> Option<i64> {
    let is_number = length.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar.
fn days_from_civil(year: i64, month: i64, day: i64) -> Option<i64> {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let length = match month {
        2 => 28 + i64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=length).contains(&day) {
        return None;
    }
    // Years begin in March here, so that the leap day is the last of its year.
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    Some(era * 146_097 + day_of_era - 719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants() {
        let second = 1_000_000_000_i128;
        assert_eq!(parse_instant("1970-01-01"), Some(0));
        assert_eq!(parse_instant("2013-01-01"), Some(1_356_998_400 * second));
        assert_eq!(parse_instant("2000-02-29T23:59:59Z"), Some(951_868_799 * second));
        assert_eq!(parse_instant("1969-12-31 23:59"), Some(-60 * second));
        assert_eq!(
            parse_instant("2013-01-01 05:15:00.25"),
            Some(1_357_017_300 * second + second / 4)
        );
    }

    #[test]
    fn what_is_no_instant_is_refused() {
        for bad in [
            "",
            "2013",
            "2013-13-01",
            "2013-02-29",
            "2013-01-01T24:00",
            "2013-01-01T1:00",
            "2013-01-01+01:00",
            "20a3-01-01",
            "2013-01-01 00:00:00.",
            "2013-01-01 00:60",
        ] {
            assert_eq!(parse_instant(bad), None, "{bad}");
        }
    }
}
