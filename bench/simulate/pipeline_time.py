from bench.simulate.prediction import TimePrediction
def time_of(config, timetable, casts, plans, found, *, timeline):
    return None
