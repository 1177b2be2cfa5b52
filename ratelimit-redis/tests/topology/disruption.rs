//! A cluster whose nodes die, hang and come back.
