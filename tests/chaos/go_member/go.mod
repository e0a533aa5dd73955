module millstream.test/go_member

go 1.24
