//! The date and time that chat templates print (`strftime_now`), in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// A moment of the proleptic Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CivilTime {
    year: i64,
    /// From 1.
    month: usize,
    day: u64,
    /// 0 is a Monday.
    weekday: usize,
    second_of_day: u64,
}

impl CivilTime {
    pub fn now() -> CivilTime {
        CivilTime::after_epoch(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    /// So long after the beginning of 1970.
    pub fn after_epoch(time: Duration) -> CivilTime {
        let (days, second_of_day) = (time.as_secs() / 86_400, time.as_secs() % 86_400);
        // Days since 1 March 0000, in eras of 400 years, of which each has as many (H. Hinnant's algorithm).
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 } as usize;
        let year = (era * 400 + year_of_era) as i64 + i64::from(month <= 2);
        CivilTime { year, month, day, weekday: ((days + 3) % 7) as usize, second_of_day }
    }

    /// As `strftime` writes it; a directive that is not known stays as it is.
    pub fn format(&self, format: &str) -> String {
        let (hour, minute, second) =
            (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let (month, weekday) = (MONTHS[self.month - 1], WEEKDAYS[self.weekday]);
        let (mut out, mut chars) = (String::new(), format.chars());
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            match chars.next() {
                Some('Y') => out.push_str(&self.year.to_string()),
                Some('y') => out.push_str(&format!("{:02}", self.year % 100)),
                Some('m') => out.push_str(&format!("{:02}", self.month)),
                Some('d') => out.push_str(&format!("{:02}", self.day)),
                Some('B') => out.push_str(month),
                Some('b') => out.push_str(&month[..3]),
                Some('A') => out.push_str(weekday),
                Some('a') => out.push_str(&weekday[..3]),
                Some('H') => out.push_str(&format!("{hour:02}")),
                Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
                Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                Some('M') => out.push_str(&format!("{minute:02}")),
                Some('S') => out.push_str(&format!("{second:02}")),
                Some('%') => out.push('%'),
                Some(other) => out.extend(['%', other]),
                None => out.push('%'),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By Python's `datetime`.
    #[test]
    fn days_are_those_of_the_calendar() {
        let at = |seconds| {
            CivilTime::after_epoch(Duration::from_secs(seconds)).format("%a %d %b %Y %H:%M:%S %I%p")
        };
        assert_eq!(at(0), "Thu 01 Jan 1970 00:00:00 12AM");
        assert_eq!(at(951_827_696), "Tue 29 Feb 2000 12:34:56 12PM");
        assert_eq!(at(1_721_999_999), "Fri 26 Jul 2024 13:19:59 01PM");
        assert_eq!(at(4_107_542_400), "Mon 01 Mar 2100 00:00:00 12AM");
    }
}
